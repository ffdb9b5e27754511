/* Recorded work, on a table that records queued work (support/backend/recording_backend.h): when it is recorded, its
 * key, and that after any failure the work is executed exactly once. */
#include "core/recording.h"
#include "core/status.h"
#include "support/backend/recording_backend.h"
#include "support/fakes/counting_allocator.h"
#include "support/testing.h"

/* Calls before a key is recorded, and the maximum number of keys, as in recording.c. */
enum { WARM = 2, MOST = 256, IDLE = 1024 };

/* Work that fills memory with a number. */
typedef struct work {
    tch_context *context;
    double *place;
    double value;
    int calls;
    int fails_at;    /* this call */
    int64_t scratch; /* taken from the workspace, if not 0 */
} work;

static tch_status do_work(void *argument)
{
    work *w = argument;
    tch_array to = {w->place, TCH_SCALAR_F64, 0, NULL, NULL};
    if (++w->calls == w->fails_at) {
        return tchi_fail(TCH_ERR_NUMERIC, "this work fails");
    }
    if (w->scratch > 0) {
        tchi_arena arena = {0};
        tchi_arena_take(&arena, w->scratch);
        TCHI_TRY(tchi_arena_reserve(w->context, &arena));
    }
    return w->context->backend->matrix->fill(w->context->state, &to, w->value);
}

static tchi_recordings recordings;
static double place;

static int open_recordings(void **state)
{
    recording_backend_install(*state);
    recordings = (tchi_recordings){0};
    return tchi_recordings_open(*state, &recordings) == TCH_OK ? 0 : -1;
}

static int close_recordings(void **state)
{
    tch_context *context = *state;
    tchi_recordings_close(context, &recordings);
    recording_backend_remove(context);
    CHECK_OK(tch_context_set_workspace_limit(context, 0));
    CHECK_OK(tch_memory_trim(context, 0));
    return recorded.released == recorded.kept ? 0 : -1;
}

static work work_of(tch_context *context)
{
    return (work){.context = context, .place = &place, .value = 3.0};
}

static tch_status try_once(work *w, int64_t key)
{
    place = -1.0;
    return tchi_recorded(w->context, &recordings, &(tchi_recording_key){{key}}, do_work, w);
}

/* Executed, either way. */
static void once(work *w, int64_t key)
{
    CHECK_OK(try_once(w, key));
    CHECK(place == w->value, "the work left %g, not %g", place, w->value);
}

static void times(work *w, int64_t key, int count)
{
    for (int i = 0; i < count; i++) {
        once(w, key);
    }
}

static void check_figures(int begun, int kept, int replayed, int released)
{
    CHECK(recorded.begun == begun && recorded.kept == kept && recorded.replayed == replayed &&
              recorded.released == released,
          "%d begun, %d kept, %d replayed, %d released; not %d, %d, %d, %d", recorded.begun, recorded.kept,
          recorded.replayed, recorded.released, begun, kept, replayed, released);
}

/* --- when work is recorded --------------------------------------------------------------------------------------- */

TEST_WITH(the_third_call_records, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM);
    check_figures(0, 0, 0, 0);
    once(&w, 1);
    check_figures(1, 1, 1, 0);
    assert_int_equal(w.calls, WARM + 1);
    w.value = 3.0;
    times(&w, 1, 5);
    check_figures(1, 1, 6, 0);
    assert_int_equal(w.calls, WARM + 1);
    assert_int_equal(recorded.operations, 1);
}

static void hear(void *user, const char *name)
{
    ++*(int *)user;
}

static void hear_end(void *user)
{
}

/* A recording does not report phases. */
TEST_WITH(who_listens_to_ranges_gets_the_work, open_recordings, close_recordings)
{
    int heard = 0;
    work w = work_of(*state);
    times(&w, 1, WARM + 1);
    CHECK_OK(tch_context_set_range_hook(*state, hear, hear_end, &heard));
    times(&w, 1, 3);
    CHECK_OK(tch_context_set_range_hook(*state, NULL, NULL, NULL));
    check_figures(1, 1, 1, 0);
    assert_int_equal(w.calls, WARM + 1 + 3);
    once(&w, 1);
    check_figures(1, 1, 2, 0);
}

TEST_WITH(keys_have_recordings_of_their_own, open_recordings, close_recordings)
{
    work w[3] = {work_of(*state), work_of(*state), work_of(*state)};
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 3; k++) {
            w[k].value = k;
            once(&w[k], 10 * k);
        }
    }
    check_figures(3, 3, 3 * (6 - WARM), 0);
}

TEST_WITH(the_last_part_of_a_key_counts, open_recordings, close_recordings)
{
    work w = work_of(*state);
    tchi_recording_key key = {0};
    for (int i = 0; i < 8; i++) {
        key.part[TCHI_RECORDING_PARTS - 1] = i % 2;
        w.value = i % 2;
        CHECK_OK(tchi_recorded(*state, &recordings, &key, do_work, &w));
        CHECK(place == w.value, "call %d left %g", i, place);
    }
    check_figures(2, 2, 2 * (4 - WARM), 0);
}

TEST_WITH(a_caller_who_records_gets_the_work, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM + 1);
    recording_fault.impossible = true;
    times(&w, 1, 3);
    check_figures(1, 1, 1, 0);
    assert_int_equal(w.calls, WARM + 4);
    recording_fault.impossible = false;
    once(&w, 1);
    check_figures(1, 1, 2, 0);
}

TEST_WITH(without_the_entries_work_is_done, open_recordings, close_recordings)
{
    tch_context *context = *state;
    work w = work_of(context);
    tchi_recordings closed = {0};
    tch_backend none = *context->backend;
    const tch_backend *table = context->backend;
    none.recording = NULL;
    context->backend = &none;
    CHECK_OK(tchi_recordings_open(context, &closed));
    for (int i = 0; i < 5; i++) {
        CHECK_OK(tchi_recorded(context, &closed, &(tchi_recording_key){0}, do_work, &w));
    }
    assert_int_equal(w.calls, 5);
    tchi_recordings_close(context, &closed);
    context->backend = table;
}

/* --- the workspace ----------------------------------------------------------------------------------------------- */

/* Recorded addresses are those of the workspace at that time: another workspace or limit means another recording. */
TEST_WITH(the_workspace_belongs_to_the_key, open_recordings, close_recordings)
{
    tch_context *context = *state;
    work w = work_of(context);
    w.scratch = 1000;
    times(&w, 1, 1 + WARM + 2); /* the first has none yet */
    check_figures(1, 1, 2, 0);
    CHECK_OK(tch_context_set_workspace_limit(context, 1 << 20));
    times(&w, 1, WARM);
    check_figures(1, 1, 2, 0);
    times(&w, 1, 2);
    check_figures(2, 2, 4, 0);
    work larger = work_of(context);
    larger.scratch = 100000;
    once(&larger, 2);
    times(&w, 1, WARM);
    check_figures(2, 2, 4, 0);
    times(&w, 1, 2);
    check_figures(3, 3, 6, 0);
}

TEST_WITH(a_workspace_that_moves_while_recording_is_noticed, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM);
    w.scratch = 50000;
    once(&w, 1);
    check_figures(1, 1, 0, 1);
    assert_int_equal(w.calls, WARM + 2); /* the failed recording, and the call itself */
    times(&w, 1, WARM + 2);              /* under the current workspace's key */
    check_figures(2, 2, 2, 1);
}

/* --- failures ---------------------------------------------------------------------------------------------------- */

/* A recording that does not begin or is empty, a replay or work that fail: the work is executed, and not recorded
 * again. */
TEST_WITH(what_fails_is_given_up, open_recordings, close_recordings)
{
    static const struct {
        recording_faults fault;
        bool work_fails;
        int kept, replayed;
    } cases[] = {{{.begin_fails = true}, false, 0, 0},
                 {{.end_gives_nothing = true}, false, 0, 0},
                 {{.replay_fails = true}, false, 1, 1},
                 {{0}, true, 1, 0}};
    for (size_t i = 0; i < TEST_COUNT(cases); i++) {
        test_case("case %d", (int)i);
        work w = work_of(*state);
        times(&w, 1, WARM);
        recording_fault = cases[i].fault;
        w.fails_at = cases[i].work_fails ? WARM + 1 : 0;
        times(&w, 1, 4);
        recording_fault = (recording_faults){0};
        times(&w, 1, 3);
        check_figures(1, cases[i].kept, cases[i].replayed, cases[i].kept);
        CHECK(w.calls >= WARM + 7, "the work was done %d times", w.calls);
        assert_int_equal(close_recordings(state), 0);
        assert_int_equal(open_recordings(state), 0);
    }
}

TEST_WITH(a_later_replay_that_fails, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM + 3);
    recording_fault.replay_fails = true;
    times(&w, 1, 1);
    recording_fault.replay_fails = false;
    times(&w, 1, 3);
    check_figures(1, 1, 4, 1);
}

/* Part of it has been queued: repeating the work would execute that part twice. */
TEST_WITH(a_replay_that_breaks_off_is_an_error, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM + 1);
    recording_fault.replay_breaks = true;
    assert_int_equal(try_once(&w, 1), TCH_ERR_BACKEND);
    CHECK(place == -1.0, "the work was done again");
    recording_fault.replay_breaks = false;
    times(&w, 1, 2);
    check_figures(1, 1, 4, 0);
    assert_int_equal(w.calls, WARM + 1);
}

TEST_WITH(work_that_fails_says_so, open_recordings, close_recordings)
{
    work w = work_of(*state);
    w.fails_at = 1;
    assert_int_equal(try_once(&w, 1), TCH_ERR_NUMERIC);
    assert_string_equal(tch_last_error(), "this work fails");
    times(&w, 1, WARM - 1);
    w.fails_at = WARM + 2; /* not in the recording: in later work */
    recording_fault.end_gives_nothing = true;
    assert_int_equal(try_once(&w, 1), TCH_ERR_NUMERIC);
}

TEST_WITH(a_stream_that_is_lost_is_an_error, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM);
    recording_fault.end_fails = true;
    assert_int_equal(try_once(&w, 1), TCH_ERR_BACKEND);
    assert_string_equal(tch_last_error(), "the stream is lost");
    check_figures(1, 1, 0, 1);
}

/* --- the number of recordings ------------------------------------------------------------------------------------ */

/* More keys in turn than fit: recorded ones are kept, the others are executed. */
TEST_WITH(too_many_do_not_drive_each_other_out, open_recordings, close_recordings)
{
    work w = work_of(*state);
    enum { KEYS = MOST + 40, ROUNDS = 3 };
    for (int round = 0; round < WARM + ROUNDS; round++) {
        for (int k = 0; k < KEYS; k++) {
            once(&w, k);
        }
    }
    check_figures(MOST, MOST, ROUNDS * MOST, 0);
}

TEST_WITH(idle_ones_give_way, open_recordings, close_recordings)
{
    work w = work_of(*state);
    for (int k = 0; k < MOST; k++) {
        times(&w, k, WARM + 1);
    }
    times(&w, 0, IDLE);
    check_figures(MOST, MOST, MOST + IDLE, 0);
    times(&w, 1000, WARM + 1); /* in the place of key 1 */
    check_figures(MOST + 1, MOST + 1, MOST + IDLE + 1, 1);
    times(&w, 0, 1);
    times(&w, MOST - 1, 1);
    check_figures(MOST + 1, MOST + 1, MOST + IDLE + 3, 1);
    times(&w, 1, 1);
    check_figures(MOST + 1, MOST + 1, MOST + IDLE + 3, 2);
}

TEST_WITH(what_is_cleared_is_recorded_anew, open_recordings, close_recordings)
{
    work w = work_of(*state);
    times(&w, 1, WARM + 1);
    times(&w, 2, WARM + 1);
    times(&w, 3, 1);
    tchi_recordings_clear(*state, &recordings);
    check_figures(2, 2, 2, 2);
    w.value = 4.0; /* another argument, not part of the key */
    times(&w, 1, WARM + 2);
    check_figures(3, 3, 4, 2);
}

TEST_WITH(without_memory_they_stay_closed, open_recordings, close_recordings)
{
    tchi_recordings none = {0};
    work w = work_of(*state);
    counting_allocator_arm(&test_counting, 1);
    assert_int_equal(tchi_recordings_open(*state, &none), TCH_ERR_OUT_OF_MEMORY);
    counting_allocator_arm(&test_counting, 0);
    CHECK_OK(tchi_recorded(*state, &none, &(tchi_recording_key){0}, do_work, &w));
    CHECK(none.calls == 0, "a closed one counts");
    tchi_recordings_close(*state, &none);
}

TEST_WITH(work_takes_no_memory, open_recordings, close_recordings)
{
    work w = work_of(*state);
    counting_allocator_arm(&test_counting, 0);
    for (int i = 0; i < 2 * MOST; i++) {
        once(&w, i);
    }
    CHECK(atomic_load(&test_counting.calls) == 0, "%lld allocations", atomic_load(&test_counting.calls));
}

static int open_all(void **state)
{
    return test_counting_install(state) == 0 ? test_open_context(state) : -1;
}

static int close_all(void **state)
{
    int status = test_close_context(state);
    test_counting_check_empty();
    return status == 0 ? test_counting_remove(state) : -1;
}

TEST_MAIN(open_all, close_all)
