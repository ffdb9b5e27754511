/* Every collective has two barriers: after all ranks have published what they send and to whom, each copies what it
 * receives; after all have copied, each returns. */
#include "pretend_group.h"

#include <errno.h>
#include <time.h>

#include "support/testing.h"

void pretend_open(pretend_group *group, int32_t size)
{
    assert_true(size >= 1 && size <= PRETEND_MOST);
    memset(group, 0, sizeof *group);
    group->size = size;
    group->timeout_s = 20.0;
    pthread_mutex_init(&group->lock, NULL);
    pthread_cond_init(&group->all_here, NULL);
    for (int32_t r = 0; r < size; r++) {
        group->ranks[r].group = group;
        group->ranks[r].rank = r;
    }
}

void pretend_close(pretend_group *group)
{
    for (int32_t r = 0; r < group->size; r++) {
        tch_comm_destroy(group->ranks[r].comm);
    }
    pthread_cond_destroy(&group->all_here);
    pthread_mutex_destroy(&group->lock);
}

/* 0 if all arrived; otherwise the group is aborted. */
static int meet(pretend_group *g)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)g->timeout_s;
    until.tv_nsec += (long)((g->timeout_s - (double)(time_t)g->timeout_s) * 1e9);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&g->lock);
    int64_t round = g->round;
    if (++g->waiting == g->size) {
        g->waiting = 0;
        g->round++;
        pthread_cond_broadcast(&g->all_here);
    }
    while (g->round == round && !g->broken) {
        if (pthread_cond_timedwait(&g->all_here, &g->lock, &until) == ETIMEDOUT) {
            g->broken = 1;
            pthread_cond_broadcast(&g->all_here);
        }
    }
    int broken = g->broken;
    pthread_mutex_unlock(&g->lock);
    return broken;
}

static void be_late(const pretend_rank *r)
{
    if (r->group->late) {
        long wait = (long)(((uint64_t)r->calls * 2654435761u + (uint64_t)r->rank * 40503u) % 2000000u);
        nanosleep(&(struct timespec){0, wait}, NULL);
    }
}

void pretend_use(pretend_group *group, int32_t rank, tch_context *context)
{
    group->ranks[rank].context = tch_context_device(context).type == TCH_DEVICE_CPU ? NULL : context;
}

/* Copies bytes to this rank's device from any rank's, or to and from the host. */
static void copy(const pretend_rank *r, void *to, bool to_host, const void *from, int64_t bytes)
{
    if (r->context == NULL) {
        memmove(to, from, (size_t)bytes);
        return;
    }
    int64_t words = bytes / (int64_t)sizeof(int32_t); /* all sizes are multiples of it */
    tch_tensor dst = tch_tensor_view(to, TCH_INT32, 1, &words);
    tch_tensor src = tch_tensor_view((void *)from, TCH_INT32, 1, &words);
    src.device = tch_context_device(r->context);
    if (!to_host) {
        dst.device = src.device;
    }
    if (bytes > 0) {
        assert_int_equal(tch_tensor_copy(r->context, &dst, &src), TCH_OK);
    }
}

static void finish(const pretend_rank *r)
{
    if (r->context != NULL) {
        tch_context_synchronize(r->context);
    }
}

/* A lost rank never reaches the barrier. */
static tch_status begin(pretend_rank *r)
{
    r->calls++;
    finish(r);
    be_late(r);
    if (r->calls == r->gone_at) {
        return TCH_ERR_COMM;
    }
    return meet(r->group) == 0 ? TCH_OK : TCH_ERR_COMM;
}

static bool fits(pretend_group *group, int64_t sent, int64_t expected)
{
    if (sent != expected) {
        pthread_mutex_lock(&group->lock);
        group->mismatches++;
        pthread_mutex_unlock(&group->lock);
    }
    return sent == expected;
}

static tch_status all_gather(void *user, const void *send, void *receive, int64_t bytes, void *stream)
{
    pretend_rank *r = user;
    r->send = send;
    r->bytes = bytes;
    if (begin(r) != TCH_OK) {
        return TCH_ERR_COMM;
    }
    for (int32_t k = 0; k < r->group->size; k++) {
        fits(r->group, r->group->ranks[k].bytes, bytes);
        copy(r, (char *)receive + k * bytes, false, r->group->ranks[k].send, bytes);
    }
    finish(r);
    return meet(r->group) == 0 ? TCH_OK : TCH_ERR_COMM;
}

/* Transports that take only byte counts expect the ranks' parts to be contiguous. */
static void follow_each_other(pretend_group *group, const int64_t *offsets, const int64_t *bytes)
{
    int64_t end = 0;
    for (int32_t k = 0; k < group->size; k++) {
        fits(group, bytes[k] == 0 ? end : offsets[k], end);
        end += bytes[k];
    }
}

static tch_status all_to_all(void *user, const void *send, void *receive, const tch_comm_counts *counts, void *stream)
{
    pretend_rank *r = user;
    r->send = send;
    r->counts = counts;
    follow_each_other(r->group, counts->send_offsets, counts->send_bytes);
    follow_each_other(r->group, counts->receive_offsets, counts->receive_bytes);
    if (begin(r) != TCH_OK) {
        return TCH_ERR_COMM;
    }
    for (int32_t k = 0; k < r->group->size; k++) {
        const pretend_rank *from = &r->group->ranks[k];
        if (fits(r->group, from->counts->send_bytes[r->rank], counts->receive_bytes[k])) {
            copy(r, (char *)receive + counts->receive_offsets[k], false,
                 (const char *)from->send + from->counts->send_offsets[r->rank], counts->receive_bytes[k]);
        }
    }
    finish(r);
    return meet(r->group) == 0 ? TCH_OK : TCH_ERR_COMM;
}

static tch_status reduce_max(void *user, int32_t *values, int32_t count, void *stream)
{
    pretend_rank *r = user;
    assert_true(count <= (int32_t)TEST_COUNT(r->numbers));
    int64_t bytes = count * (int64_t)sizeof *values;
    copy(r, r->numbers, true, values, bytes);
    if (begin(r) != TCH_OK) {
        return TCH_ERR_COMM;
    }
    int32_t largest[TEST_COUNT(r->numbers)];
    memcpy(largest, r->numbers, (size_t)bytes);
    for (int32_t k = 0; k < r->group->size; k++) {
        for (int32_t i = 0; i < count; i++) {
            int32_t theirs = r->group->ranks[k].numbers[i];
            largest[i] = theirs > largest[i] ? theirs : largest[i];
        }
    }
    if (meet(r->group) != 0) {
        return TCH_ERR_COMM;
    }
    if (r->context == NULL) {
        memcpy(values, largest, (size_t)bytes);
        return TCH_OK;
    }
    int64_t words = count;
    tch_tensor src = tch_tensor_view(largest, TCH_INT32, 1, &words);
    tch_tensor dst = tch_tensor_view(values, TCH_INT32, 1, &words);
    dst.device = tch_context_device(r->context);
    return tch_tensor_copy(r->context, &dst, &src);
}

tch_comm *pretend_comm(pretend_group *group, int32_t rank)
{
    static const tch_comm_ops ops = {sizeof(tch_comm_ops), all_gather, all_to_all, reduce_max, NULL, NULL, NULL};
    tch_comm_config config = TCH_COMM_CONFIG_INIT;
    config.name = "pretended";
    config.rank = rank;
    config.size = group->size;
    config.ops = &ops;
    config.user = &group->ranks[rank];
    config.bucket_bytes = group->bucket_bytes;
    config.span_bytes = group->span_bytes;
    if (group->ranks[rank].comm == NULL) {
        assert_int_equal(tch_comm_create(&config, &group->ranks[rank].comm), TCH_OK);
    }
    return group->ranks[rank].comm;
}

typedef struct runner {
    tch_comm *comm;
    int32_t rank;
    pretend_task task;
    void *user;
    pthread_t thread;
} runner;

static void *run_one(void *argument)
{
    const runner *r = argument;
    r->task(r->comm, r->rank, r->user);
    return NULL;
}

void pretend_run(pretend_group *group, pretend_task task, void *user)
{
    runner runners[PRETEND_MOST];
    for (int32_t r = 0; r < group->size; r++) {
        runners[r] = (runner){pretend_comm(group, r), r, task, user, 0};
    }
    for (int32_t r = 0; r < group->size; r++) {
        assert_int_equal(pthread_create(&runners[r].thread, NULL, run_one, &runners[r]), 0);
    }
    for (int32_t r = 0; r < group->size; r++) {
        pthread_join(runners[r].thread, NULL);
    }
}
