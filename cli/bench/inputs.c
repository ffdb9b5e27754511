/* Inputs of the cases: the same numbers in every run. */
#include "bench.h"

#include "measure/random_matrices.h"

/* Seeds of the inputs: fresh for each input of a case, the same in every run. */
static const uint64_t first_seed = 1000;

tch_status bench_add_random(const workplace *place, bench_data *d, int index, int64_t rows, int64_t cols)
{
    CLI_TRY(workplace_matrices(place->device, d->c->dtype, d->c->batch, rows, cols, &d->in[index]));
    return random_entries(place, first_seed + (uint64_t)index, d->in[index]);
}

/* Each costs the host three products to build, so that a large batch repeats the first ones. */
enum { DISTINCT = 16 };

static tch_status fill_symmetric(const workplace *place, const double *spectrum, tch_tensor *out)
{
    int64_t batch = out->shape[0], n = out->shape[2];
    int64_t shape[] = {batch < DISTINCT ? batch : DISTINCT, n, n};
    tch_tensor distinct = *out;
    distinct.shape = shape;
    CLI_TRY(random_symmetric(place, first_seed, spectrum, &distinct));
    for (int64_t i = DISTINCT; i < batch; i++) {
        tch_tensor slice = workplace_slice(out, i), earlier = workplace_slice(out, i % DISTINCT);
        CLI_TRY(tch_tensor_copy(place->device, &slice, &earlier));
    }
    return TCH_OK;
}

/* Matrices of one seed commute, whatever their spectra. */
tch_status bench_add_symmetric(const workplace *place, bench_data *d, int index, int64_t n, double condition)
{
    tch_tensor *spectrum = NULL;
    tch_status status = workplace_matrices(place->device, d->c->dtype, d->c->batch, n, n, &d->in[index]);
    if (status == TCH_OK) {
        status = workplace_vector(place->host, TCH_FLOAT64, n, &spectrum);
    }
    if (status == TCH_OK) {
        random_power_law(n, condition, spectrum->data);
        status = fill_symmetric(place, spectrum->data, d->in[index]);
    }
    tch_tensor_destroy(spectrum);
    return status;
}
