/* Streams, events and page-locked rings between host and device: see streamed.h. */
#include "streamed.h"

#include "backends/host_memory.h"

/* --- creation ---------------------------------------------------------------------------------------------------- */

static tch_status make_event(cudaEvent_t *event)
{
    return tchi_cuda_check(tchi_cuda_ensure_event(event), "cudaEventCreate");
}

static tch_status make_ring(tchi_cuda_staging *s, tchi_staging_ring *ring)
{
    for (int i = 0; i < TCHI_STAGING_CHUNKS; i++) {
        TCHI_TRY(make_event(&ring->copied[i]));
    }
    if (ring->memory == NULL) {
        TCHI_CUDA_TRY(
            cudaHostAlloc((void **)&ring->memory, TCHI_STAGING_CHUNKS * TCHI_STAGING_CHUNK_BYTES, cudaHostAllocDefault),
            "page-locked memory for streamed products");
    }
    if (s->threads == NULL && (s->threads = tchi_copy_threads_create()) == NULL) {
        return tchi_cuda_host->fail(TCH_ERR_OUT_OF_MEMORY, "no host memory for the threads of streamed products");
    }
    return TCH_OK;
}

tch_status tchi_cuda_staging_ready(tchi_cuda_state *state, int ring_in, int ring_out)
{
    if (state->staging == NULL) {
        TCHI_TRY(tchi_backend_take(tchi_cuda_host, sizeof *state->staging, "streamed products", &state->staging));
    }
    tchi_cuda_staging *s = state->staging;
    TCHI_CUDA_TRY(tchi_cuda_ensure_stream(&s->in), "cudaStreamCreate");
    TCHI_CUDA_TRY(tchi_cuda_ensure_stream(&s->out), "cudaStreamCreate");
    TCHI_TRY(make_event(&s->start));
    for (int i = 0; i < 6; i++) {
        tchi_slot_events *slot = &s->slots[i / 2][i % 2];
        TCHI_TRY(make_event(&slot->filled));
        TCHI_TRY(make_event(&slot->used));
        TCHI_TRY(make_event(&slot->drained));
    }
    TCHI_TRY(ring_in ? make_ring(s, &s->inward) : TCH_OK);
    return ring_out ? make_ring(s, &s->outward) : TCH_OK;
}

/* --- destruction ------------------------------------------------------------------------------------------------- */

static void end_ring(tchi_staging_ring *ring)
{
    for (int i = 0; i < TCHI_STAGING_CHUNKS; i++) {
        tchi_cuda_drop_event(ring->copied[i]);
    }
    if (ring->memory != NULL) {
        (void)cudaFreeHost(ring->memory);
    }
}

void tchi_cuda_staging_destroy(tchi_cuda_staging *s)
{
    if (s == NULL) {
        return;
    }
    tchi_copy_threads_destroy(s->threads);
    tchi_cuda_drop_stream(s->in);
    tchi_cuda_drop_stream(s->out);
    for (int i = 0; i < 6; i++) {
        tchi_cuda_drop_event(s->slots[i / 2][i % 2].filled);
        tchi_cuda_drop_event(s->slots[i / 2][i % 2].used);
        tchi_cuda_drop_event(s->slots[i / 2][i % 2].drained);
    }
    tchi_cuda_drop_event(s->start);
    end_ring(&s->inward);
    end_ring(&s->outward);
    tchi_cuda_host->release(s, sizeof *s);
}

/* --- copies ------------------------------------------------------------------------------------------------------ */

/* CUDA's largest pitch. */
#define MOST_PITCH INT32_MAX

tch_status tchi_cuda_staging_copy(const tchi_rows *r, cudaStream_t stream)
{
    if (r->rows < 1 || r->width < 1) {
        return TCH_OK;
    }
    if (r->to_pitch <= MOST_PITCH && r->from_pitch <= MOST_PITCH) {
        return tchi_cuda_check(cudaMemcpy2DAsync(r->to, (size_t)r->to_pitch, r->from, (size_t)r->from_pitch,
                                                 (size_t)r->width, (size_t)r->rows, cudaMemcpyDefault, stream),
                               "cudaMemcpy2DAsync");
    }
    for (int64_t i = 0; i < r->rows; i++) {
        TCHI_CUDA_TRY(cudaMemcpyAsync(r->to + i * r->to_pitch, r->from + i * r->from_pitch, (size_t)r->width,
                                      cudaMemcpyDefault, stream),
                      "cudaMemcpyAsync");
    }
    return TCH_OK;
}

static char *chunk_memory(const tchi_staging_ring *ring, int64_t chunk)
{
    return ring->memory + chunk % TCHI_STAGING_CHUNKS * TCHI_STAGING_CHUNK_BYTES;
}

tch_status tchi_cuda_staging_send(tchi_cuda_staging *s, const tchi_rows *r)
{
    tchi_staging_ring *ring = &s->inward;
    int64_t chunk = ring->next++;
    cudaEvent_t copied = ring->copied[chunk % TCHI_STAGING_CHUNKS];
    tchi_rows pack = *r;
    tchi_rows send = *r;
    pack.to = chunk_memory(ring, chunk);
    pack.to_pitch = r->width;
    send.from = pack.to;
    send.from_pitch = r->width;
    TCHI_CUDA_TRY(cudaEventSynchronize(copied), "waiting for a copy to the device");
    tchi_copy_threads_run(s->threads, &pack);
    TCHI_TRY(tchi_cuda_staging_copy(&send, s->in));
    return tchi_cuda_check(cudaEventRecord(copied, s->in), "cudaEventRecord");
}

tch_status tchi_cuda_staging_fetch(tchi_cuda_staging *s, const tchi_rows *r, int64_t *chunk)
{
    tchi_staging_ring *ring = &s->outward;
    tchi_rows fetch = *r;
    *chunk = ring->next++;
    fetch.to = chunk_memory(ring, *chunk);
    fetch.to_pitch = r->width;
    TCHI_TRY(tchi_cuda_staging_copy(&fetch, s->out));
    return tchi_cuda_check(cudaEventRecord(ring->copied[*chunk % TCHI_STAGING_CHUNKS], s->out), "cudaEventRecord");
}

tch_status tchi_cuda_staging_deliver(tchi_cuda_staging *s, const tchi_rows *r, int64_t chunk)
{
    tchi_staging_ring *ring = &s->outward;
    tchi_rows unpack = *r;
    unpack.from = chunk_memory(ring, chunk);
    unpack.from_pitch = r->width;
    TCHI_CUDA_TRY(cudaEventSynchronize(ring->copied[chunk % TCHI_STAGING_CHUNKS]), "waiting for a copy to the host");
    tchi_copy_threads_run(s->threads, &unpack);
    return TCH_OK;
}
