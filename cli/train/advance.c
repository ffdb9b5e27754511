/* The clock runs from the first step of a stretch to the end of the last one on the device, and stands still while
 * losses are measured. */
#include "advance.h"

#include "measure/timing.h"
#include "results/report.h"
#include "stop.h"

tch_status train_advance(train_session *session, train_run *run, int64_t until)
{
    tch_status status = TCH_OK;
    double started = timing_now();
    while (status == TCH_OK && run->step < until && !train_stop_asked()) {
        status = train_run_step(&session->setup, run);
        train_report_progress(session, run);
    }
    if (status == TCH_OK) {
        status = tch_context_synchronize(session->setup.context);
    }
    run->seconds += timing_now() - started;
    return status;
}
