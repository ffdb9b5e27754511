#include "slice.h"

#include <stddef.h>

#include "core/status.h"

/* -1 on overflow of 63 bits. An empty tensor may have sizes that overflow before the 0. */
static int64_t product(const int64_t *sizes, int32_t from, int32_t to)
{
    int64_t count = 1;
    bool overflow = false;
    for (int32_t k = from; k < to; k++) {
        if (sizes[k] == 0) {
            return 0;
        }
        overflow = overflow || __builtin_mul_overflow(count, sizes[k], &count);
    }
    return overflow ? -1 : count;
}

bool tchi_slice_is_sound(const tchi_slice *s)
{
    bool good = s->ndim >= 0;
    for (int32_t k = 0; good && k < s->ndim; k++) {
        good = s->shape[k] >= 0 && s->size[k] >= 0 && s->start[k] >= 0 && s->size[k] <= s->shape[k] &&
               s->start[k] <= s->shape[k] - s->size[k];
    }
    return good && product(s->shape, 0, s->ndim) >= 0;
}

int64_t tchi_slice_count(const tchi_slice *slice)
{
    return product(slice->size, 0, slice->ndim);
}

/* Advances both shapes, the smaller product first; they meet at the end of merged dimensions. Only one of them may be
 * ahead at a time, otherwise neither merges the other. */
bool tchi_slice_same_whole(const tchi_slice *a, const tchi_slice *b)
{
    int64_t in_a = 1;
    int64_t in_b = 1;
    int32_t i = 0;
    int32_t j = 0;
    bool a_merges = true;
    bool b_merges = true;
    int64_t all = product(a->shape, 0, a->ndim);
    if (all != product(b->shape, 0, b->ndim)) {
        return false;
    }
    if (all == 0) {
        return true;
    }
    while (i < a->ndim || j < b->ndim) {
        if (in_a == in_b) {
            in_a = in_b = 1;
            in_a *= i < a->ndim ? a->shape[i++] : 1;
            in_b *= j < b->ndim ? b->shape[j++] : 1;
        } else if (in_a < in_b && i < a->ndim) {
            in_a *= a->shape[i++];
            a_merges = a_merges && a->shape[i - 1] == 1;
        } else if (in_b < in_a && j < b->ndim) {
            in_b *= b->shape[j++];
            b_merges = b_merges && b->shape[j - 1] == 1;
        } else {
            return false;
        }
    }
    return in_a == in_b && (a_merges || b_merges);
}

bool tchi_slice_equal(const tchi_slice *a, const tchi_slice *b)
{
    bool same = a->ndim == b->ndim;
    for (int32_t k = 0; same && k < a->ndim; k++) {
        same = a->shape[k] == b->shape[k] && a->start[k] == b->start[k] && a->size[k] == b->size[k];
    }
    return same;
}

bool tchi_slice_overlap(const tchi_slice *a, const tchi_slice *b)
{
    bool overlap = true;
    for (int32_t k = 0; overlap && k < a->ndim; k++) {
        int64_t end_a = a->start[k] + a->size[k];
        int64_t end_b = b->start[k] + b->size[k];
        int64_t start = a->start[k] > b->start[k] ? a->start[k] : b->start[k];
        overlap = start < (end_a < end_b ? end_a : end_b);
    }
    return overlap;
}

/* --- runs -------------------------------------------------------------------------------------------------------- */

/* A rectangle as runs: along dimension `outer` it is [begin, begin + length) of every `row` elements of the whole;
 * inner dimensions are complete. */
typedef struct runs {
    const tchi_slice *slice;
    int32_t outer;
    int64_t row, begin, length;
    int64_t count;       /* of runs */
    int64_t first, last; /* elements of the whole */
} runs;

/* The first element, in the whole, of run `number`. */
static int64_t run_start(const runs *r, int64_t number)
{
    const tchi_slice *s = r->slice;
    int64_t at = r->begin;
    int64_t stride = r->row;
    for (int32_t k = r->outer - 1; k >= 0; k--) {
        at += (s->start[k] + number % s->size[k]) * stride;
        number /= s->size[k];
        stride *= s->shape[k];
    }
    return at;
}

/* Requires a rectangle that is not empty. */
static runs runs_of(const tchi_slice *s)
{
    runs r = {.slice = s, .outer = s->ndim > 0 ? s->ndim - 1 : 0, .row = 1, .length = 1, .count = 1};
    while (r.outer > 0 && s->size[r.outer] == s->shape[r.outer]) {
        r.outer--;
    }
    if (s->ndim > 0) {
        int64_t inner = product(s->shape, r.outer + 1, s->ndim);
        r.row = s->shape[r.outer] * inner;
        r.begin = s->start[r.outer] * inner;
        r.length = s->size[r.outer] * inner;
        r.count = product(s->size, 0, r.outer);
    }
    r.first = run_start(&r, 0);
    r.last = run_start(&r, r.count - 1) + r.length - 1;
    return r;
}

/* Whether the rectangle contains element `x` of the whole: then its index there, and the number of contiguous elements.
 * Otherwise *span elements from x on are outside. */
static bool locate(const runs *r, int64_t x, int64_t *offset, int64_t *span)
{
    const tchi_slice *s = r->slice;
    int64_t rest = x / r->row;
    int64_t in_row = x % r->row;
    int64_t run = 0;
    int64_t stride = 1;
    for (int32_t k = r->outer - 1; k >= 0; k--) {
        int64_t index = rest % s->shape[k] - s->start[k];
        if (index < 0 || index >= s->size[k]) {
            *span = r->row - in_row;
            return false;
        }
        rest /= s->shape[k];
        run += index * stride;
        stride *= s->size[k];
    }
    bool inside = in_row >= r->begin && in_row < r->begin + r->length;
    *offset = run * r->length + in_row - r->begin;
    *span = (inside ? r->begin + r->length : in_row < r->begin ? r->begin : r->row) - in_row;
    return inside;
}

/* Visits what one run of `to`, elements [x, end) of the whole, shares with `from`. */
static tch_status meet_run(const runs *from, int64_t x, int64_t end, int64_t in_to, tchi_slice_visit visit, void *user,
                           int64_t *shared)
{
    if (x < from->first) {
        in_to += from->first - x;
        x = from->first;
    }
    end = end <= from->last ? end : from->last + 1;
    while (x < end) {
        int64_t in_from = 0;
        int64_t span = 0;
        bool inside = locate(from, x, &in_from, &span);
        int64_t count = span < end - x ? span : end - x;
        if (inside) {
            *shared += count;
            TCHI_TRY(visit == NULL ? TCH_OK : visit(user, in_from, in_to, count));
        }
        x += count;
        in_to += count;
    }
    return TCH_OK;
}

tch_status tchi_slice_meet(const tchi_slice *from, const tchi_slice *to, tchi_slice_visit visit, void *user,
                           int64_t *shared)
{
    *shared = 0;
    if (tchi_slice_count(from) == 0 || tchi_slice_count(to) == 0) {
        return TCH_OK;
    }
    runs a = runs_of(from);
    runs b = runs_of(to);
    for (int64_t i = 0; i < b.count; i++) {
        int64_t x = run_start(&b, i);
        TCHI_TRY(meet_run(&a, x, x + b.length, i * b.length, visit, user, shared));
    }
    return TCH_OK;
}
