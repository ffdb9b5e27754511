/* Products A' B over a batch where little is summed over: the gradients of single samples. BLAS reads C before it writes
 * it, and prepares for longer sums; here tiles are summed in registers and written once. What is left over at the edges goes to BLAS. */
#define _DEFAULT_SOURCE
#include "thin_product.h"

#include <sys/mman.h>
#include <unistd.h>

/* How a result is written that is larger than the caches near a core, as measured for 268 MB on two cores. Where its pages
 * are there, past the caches: 6.5 ms against 14.5. Where they have never been touched the kernel has to clear them, which it
 * does through the caches; being asked for all pages of a band at once, it took 107 ms, page by page 160. */
#define LARGE ((int64_t)16 << 20)

#ifndef MADV_POPULATE_WRITE /* since Linux 5.14; older kernels refuse it, and nothing is lost */
#define MADV_POPULATE_WRITE 23
#endif

typedef struct thin_job {
    const tchi_cpu_state *state;
    const tch_matrices *a, *b, *c;
    float alpha;
    int64_t bands;   /* of one matrix */
    int past_caches; /* the result is large, and its pages are there */
    int untouched;   /* it is large, and they are not */
    tchi_thin_product product;
} thin_job;

/* C(rows, cols) at this place, by BLAS. */
static void edge(const tchi_thin_job *j, const tchi_cpu_state *state, int64_t row, int64_t rows, int64_t col,
                 int64_t cols)
{
    if (rows > 0 && cols > 0) {
        state->blas->f32.gemm(TCHI_ROW_MAJOR, TCHI_TRANS, TCHI_NO_TRANS, (int)rows, (int)cols, (int)j->inner, j->alpha,
                              j->a + row, (int)j->lda, j->b + col, (int)j->ldb, 0.0F, j->c + row * j->ldc + col,
                              (int)j->ldc);
    }
}

/* The whole pages of these bytes. */
static void ask_for_pages(void *start, int64_t bytes)
{
    int64_t page = (int64_t)sysconf(_SC_PAGESIZE);
    int64_t before = (page - (int64_t)((uintptr_t)start % (uintptr_t)page)) % page;
    int64_t whole = (bytes - before) / page * page;
    if (whole > 0) {
        (void)madvise((char *)start + before, (size_t)whole, MADV_POPULATE_WRITE);
    }
}

static void thin_band(void *argument, int64_t index, int thread)
{
    (void)thread;
    const thin_job *t = argument;
    int64_t i = index / t->bands;
    int64_t first = index % t->bands * TCHI_THIN_MOST_ROWS;
    int64_t rows = t->c->rows - first < TCHI_THIN_MOST_ROWS ? t->c->rows - first : TCHI_THIN_MOST_ROWS;
    tchi_thin_job j = {.lda = t->a->ld, .ldb = t->b->ld, .ldc = t->c->ld, .inner = t->a->rows, .alpha = t->alpha};
    j.a = (const float *)tchi_cpu_row(t->a, i, 0) + first;
    j.b = tchi_cpu_row(t->b, i, 0);
    j.c = tchi_cpu_row(t->c, i, first);
    j.rows = rows / TCHI_THIN_ROWS * TCHI_THIN_ROWS;
    j.cols = t->c->cols / TCHI_THIN_COLS * TCHI_THIN_COLS;
    j.past_caches = t->past_caches;
    if (t->untouched) {
        ask_for_pages(j.c, ((rows - 1) * j.ldc + t->c->cols) * (int64_t)sizeof *j.c);
    }
    t->product(&j);
    edge(&j, t->state, 0, rows, j.cols, t->c->cols - j.cols);
    edge(&j, t->state, j.rows, rows - j.rows, 0, j.cols);
}

/* One page in the middle stands for all. */
static int is_resident(void *address)
{
    unsigned char answer = 0;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *start = (char *)address - (uintptr_t)address % page;
    return mincore(start, (size_t)page, &answer) == 0 && (answer & 1) != 0;
}

static void choose_writing(thin_job *job)
{
    const tch_matrices *c = job->c;
    int64_t bytes = c->batch * c->rows * c->cols * tchi_cpu_size(c->type);
    int aligned = (uintptr_t)c->data % 64 == 0 && c->ld % 16 == 0 && (c->batch < 2 || c->stride % 16 == 0);
    if (bytes >= LARGE) {
        int resident = is_resident(tchi_cpu_row(c, c->batch / 2, c->rows / 2));
        job->past_caches = resident && aligned;
        job->untouched = !resident;
    }
}

int tchi_cpu_thin_product(const tchi_cpu_state *state, double alpha, const tch_matrices *a, const tch_matrices *b,
                          const tch_matrices *c)
{
    thin_job job = {.state = state, .a = a, .b = b, .c = c, .alpha = (float)alpha, .product = tchi_thin_product_now()};
    if (job.product == NULL || c->type != TCH_SCALAR_F32 || a->rows > TCHI_THIN_MOST_INNER ||
        c->rows < TCHI_THIN_ROWS || c->cols < TCHI_THIN_COLS) {
        return 0;
    }
    choose_writing(&job);
    job.bands = (c->rows + TCHI_THIN_MOST_ROWS - 1) / TCHI_THIN_MOST_ROWS;
    double work = 2.0 * TCHI_THIN_MOST_ROWS * (double)c->cols * (double)(a->rows + 1);
    tchi_cpu_for_each(state, c->batch * job.bands, work, thin_band, &job);
    return 1;
}
