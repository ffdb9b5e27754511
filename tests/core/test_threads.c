/* Two contexts in two threads: each gets the results of a single thread, and each thread has its own message. The main
 * thread checks results, since a failed check cannot unwind another thread's stack. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>

#include "support/linalg/operations.h"
#include "support/testing.h"

/* Besides the operations of the table, roots of matrices large enough for blocked algorithms. */
enum { ROUNDS = 3, LARGE = 130, MOST_CALLS = 64 };

static test_operation operations[MOST_CALLS];
static int32_t operation_count;

static int list_operations(void **state)
{
    for (int32_t i = 0; i < test_operation_count(); i++) {
        operations[operation_count++] = test_operations[i];
        if (strcmp(test_operations[i].name, "tch_inverse_root") == 0) {
            test_operation *large = &operations[operation_count++];
            *large = test_operations[i];
            for (int32_t k = 0; k < large->count && large->operands[k].ndim == 3; k++) {
                large->operands[k].shape[1] = large->operands[k].shape[2] = LARGE;
            }
        }
    }
    return operation_count <= MOST_CALLS ? 0 : -1;
}

/* Calls work(arguments + i size) in `count` threads, and waits for all. */
static void in_threads(int count, void *(*work)(void *), void *arguments, size_t size)
{
    pthread_t threads[8];
    for (int i = 0; i < count; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, work, (char *)arguments + (size_t)i * size), 0);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
}

/* First, so that several threads fill the registry concurrently. */
static void *come_and_go(void *argument)
{
    int *failures = argument;
    int32_t count = tch_backend_count(); /* complete, whoever fills it */
    for (int i = 0; i < 50; i++) {
        tch_context *context = NULL;
        *failures += tch_context_create(test_device(), &context) != TCH_OK;
        *failures += count != tch_backend_count();
        tch_context_destroy(context);
    }
    return NULL;
}

TEST(contexts_come_and_go_in_many_threads)
{
    enum { COUNT = 8 };
    int failures[COUNT] = {0};
    in_threads(COUNT, come_and_go, failures, sizeof *failures);
    for (int i = 0; i < COUNT; i++) {
        assert_int_equal(failures[i], 0);
    }
}

/* The outputs of one call, compared bitwise. */
typedef struct outcome {
    tch_status status;
    double *outputs[TEST_MAX_OPERANDS];
} outcome;

static void record(const test_call *call, outcome *result)
{
    for (int32_t i = 0; i < call->operation->count; i++) {
        result->outputs[i] = test_is_output(&call->operation->operands[i]) ? test_tensor_read(call->tensors[i]) : NULL;
    }
}

typedef struct worker {
    tch_context *context;
    test_call *calls; /* one per operation, made by the main thread */
    int32_t first;    /* first row, so that two workers run different operations */
    outcome *outcomes;
    pthread_barrier_t *start;
} worker;

/* Library calls only, no cmocka. */
static void *run_calls(void *argument)
{
    worker *w = argument;
    pthread_barrier_wait(w->start);
    for (int32_t i = 0; i < ROUNDS * operation_count; i++) {
        int32_t which = (w->first + i) % operation_count;
        tch_status status = test_call_run(&w->calls[which], w->context);
        if (status == TCH_OK) {
            status = tch_context_synchronize(w->context);
        }
        if (i < operation_count || status != TCH_OK) {
            w->outcomes[which].status = status;
        }
    }
    return NULL;
}

static void make_worker(worker *w, int32_t first, tch_dtype dtype)
{
    w->first = first;
    w->calls = test_alloc((size_t)operation_count * sizeof *w->calls);
    w->outcomes = test_alloc((size_t)operation_count * sizeof *w->outcomes);
    memset(w->outcomes, 0, (size_t)operation_count * sizeof *w->outcomes);
    CHECK_OK(tch_context_create(test_device(), &w->context));
    for (int32_t i = 0; i < operation_count; i++) {
        test_call_make(&w->calls[i], w->context, &operations[i], dtype);
    }
}

static void free_worker(worker *w)
{
    for (int32_t i = 0; i < operation_count; i++) {
        test_call_free(&w->calls[i]);
    }
    tch_context_destroy(w->context);
}

/* The same calls on one thread. */
static void run_alone(outcome *expected, tch_dtype dtype)
{
    worker w;
    make_worker(&w, 0, dtype);
    for (int32_t i = 0; i < operation_count; i++) {
        CHECK_OK(test_call_run(&w.calls[i], w.context));
        record(&w.calls[i], &expected[i]);
    }
    free_worker(&w);
}

static void compare(const worker *w, const outcome *expected)
{
    for (int32_t i = 0; i < operation_count; i++) {
        const test_operation *operation = &operations[i];
        test_case("%s %s", operation->name, operation->variant);
        CHECK(w->outcomes[i].status == TCH_OK, "gave %s", tch_status_name(w->outcomes[i].status));
        outcome got = {0};
        record(&w->calls[i], &got);
        for (int32_t j = 0; j < operation->count; j++) {
            CHECK(got.outputs[j] == NULL || memcmp(got.outputs[j], expected[i].outputs[j],
                                                   (size_t)w->calls[i].tensors[j]->count * sizeof(double)) == 0,
                  "%s differs from what one thread computes", operation->operands[j].name);
        }
    }
}

static void run_together(int count, tch_dtype dtype)
{
    enum { MOST = 4 };
    worker workers[MOST];
    pthread_barrier_t start;
    outcome *expected = test_alloc((size_t)operation_count * sizeof *expected);
    memset(expected, 0, (size_t)operation_count * sizeof *expected);
    run_alone(expected, dtype);
    pthread_barrier_init(&start, NULL, (unsigned)count);
    for (int i = 0; i < count; i++) {
        make_worker(&workers[i], i * operation_count / count, dtype);
        workers[i].start = &start;
    }
    in_threads(count, run_calls, workers, sizeof *workers);
    for (int i = 0; i < count; i++) {
        compare(&workers[i], expected);
        free_worker(&workers[i]);
    }
    pthread_barrier_destroy(&start);
}

TEST_WITH(contexts_in_several_threads, list_operations, test_release)
{
    run_together(4, TCH_FLOAT32);
    run_together(2, TCH_FLOAT64);
}

/* --- messages ---------------------------------------------------------------------------------------------------- */

typedef struct speaker {
    char name[16];
    int wrong; /* times the thread saw another's message */
    char empty_at_start;
} speaker;

static void *speak(void *argument)
{
    speaker *s = argument;
    tch_device device;
    s->empty_at_start = tch_last_error()[0] == '\0';
    for (int i = 0; i < 2000; i++) {
        tch_device_parse(s->name, &device);
        s->wrong += strstr(tch_last_error(), s->name) == NULL;
    }
    return NULL;
}

TEST(messages_belong_to_their_thread)
{
    enum { COUNT = 4 };
    speaker speakers[COUNT] = {{{0}, 0, 0}};
    tch_device device;
    tch_device_parse("main thread", &device);
    for (int i = 0; i < COUNT; i++) {
        snprintf(speakers[i].name, sizeof speakers[i].name, "speaker %d", i);
    }
    in_threads(COUNT, speak, speakers, sizeof *speakers);
    for (int i = 0; i < COUNT; i++) {
        CHECK(speakers[i].empty_at_start, "a new thread began with a message");
        CHECK(speakers[i].wrong == 0, "thread %d saw %d messages of others", i, speakers[i].wrong);
    }
    CHECK(strstr(tch_last_error(), "main thread") != NULL, "the main thread's message is now: %s", tch_last_error());
}

/* --- lifetimes --------------------------------------------------------------------------------------------------- */

static void *destroy_tensors(void *argument)
{
    tch_tensor **tensors = argument;
    for (int i = 0; i < 100; i++) {
        tch_tensor_destroy(tensors[i]);
    }
    return NULL;
}

/* Tensors may be released by another thread while the context is in use, as garbage collectors do. */
TEST(tensors_may_be_destroyed_by_another_thread)
{
    tch_context *context = NULL;
    tch_tensor *tensors[100];
    const int64_t shape[] = {64};
    pthread_t thread;
    CHECK_OK(tch_context_create(test_device(), &context));
    for (int i = 0; i < 100; i++) {
        CHECK_OK(tch_tensor_create(context, TCH_FLOAT32, 1, shape, TCH_CONTIGUOUS, &tensors[i]));
    }
    assert_int_equal(pthread_create(&thread, NULL, destroy_tensors, tensors), 0);
    for (int i = 0; i < 100; i++) {
        void *pointer = NULL;
        CHECK_OK(tch_memory_alloc(context, 256, &pointer));
        CHECK_OK(tch_memory_free(context, pointer));
    }
    tch_context_destroy(context);
    pthread_join(thread, NULL);
}

TEST_MAIN(NULL, NULL)
