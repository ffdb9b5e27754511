/* The main of a fuzz target without libFuzzer: replays a corpus, then mutates it at random.
 *
 *     fuzz_NAME [--seconds 2 | --runs 1000000] [--seed 7] [--dictionary FILE] CORPUS
 *
 * The seed is random unless given, and is printed. An input that crashes or hangs the target is saved in the current
 * folder as crash-NAME, and can be passed in place of a corpus. The dictionary has libFuzzer's format; libFuzzer itself
 * takes its own options. */
#define _GNU_SOURCE
#include "fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#define MOST_BYTES 16384
#define MOST_INPUTS 512
#define MOST_WORDS 256
#define SECONDS_FOR_A_RUN 60  /* or for a hundred of them; long, since machines are shared */
#define MOST_GROWTH (1 << 20) /* of the heap, after the first runs: some tables grow to their maximum */

typedef struct input {
    uint8_t *bytes;
    size_t count;
} input;

static input corpus[MOST_INPUTS];
static size_t corpus_count;
static input words[MOST_WORDS];
static size_t word_count;

/* The current input, for the signal handler. */
static uint8_t current[MOST_BYTES];
static size_t current_count;
static char crash_path[PATH_MAX];

/* --- random numbers ---------------------------------------------------------------------------------------------- */

static uint64_t random_state;

/* splitmix64 */
static uint64_t random_bits(void)
{
    uint64_t z = random_state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

static size_t random_below(size_t count)
{
    return count == 0 ? 0 : (size_t)(random_bits() % count);
}

/* --- the corpus and the dictionary ------------------------------------------------------------------------------- */

static bool read_file(const char *path, input *in)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    in->bytes = malloc(MOST_BYTES);
    REQUIRE(in->bytes != NULL);
    in->count = fread(in->bytes, 1, MOST_BYTES, file);
    fclose(file);
    return true;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* A folder, or one file. Sorted by name, so that a seed determines the run. */
static void read_corpus(const char *path)
{
    struct dirent **entries = NULL;
    int count = scandir(path, &entries, NULL, by_name);
    if (count < 0) {
        corpus_count += corpus_count < MOST_INPUTS && read_file(path, &corpus[corpus_count]);
        return;
    }
    for (int i = 0; i < count; i++) {
        char name[PATH_MAX];
        snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
        if (entries[i]->d_name[0] != '.' && corpus_count < MOST_INPUTS) {
            corpus_count += read_file(name, &corpus[corpus_count]);
        }
        free(entries[i]);
    }
    free(entries);
}

/* The text between quotes; \\, \" and \xAB are escapes. */
static void add_word(const char *from)
{
    input *word = &words[word_count++];
    word->bytes = malloc(strlen(from) + 1);
    REQUIRE(word->bytes != NULL);
    for (word->count = 0; *from != '\0' && *from != '"'; from++) {
        unsigned byte = (unsigned char)*from;
        if (*from == '\\' && sscanf(from, "\\x%2x", &byte) == 1) {
            from += 3;
        } else if (*from == '\\') {
            byte = (unsigned char)*++from;
        }
        word->bytes[word->count++] = (uint8_t)byte;
    }
}

static void read_dictionary(const char *path)
{
    char line[512];
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        const char *quote = line[0] == '#' ? NULL : strchr(line, '"');
        if (quote != NULL && word_count < MOST_WORDS) {
            add_word(quote + 1);
        }
    }
    fclose(file);
}

/* --- mutations --------------------------------------------------------------------------------------------------- */

/* Opens or closes a gap: moves what began at `from` to `at`. */
static void move_rest(size_t at, size_t from)
{
    size_t rest = current_count - from;
    if (at + rest <= MOST_BYTES) {
        memmove(current + at, current + from, rest);
        current_count = at + rest;
    }
}

static void insert(size_t at, const uint8_t *bytes, size_t count)
{
    if (current_count + count <= MOST_BYTES) {
        move_rest(at + count, at);
        memcpy(current + at, bytes, count);
    }
}

static void insert_word(size_t at)
{
    if (word_count > 0) {
        const input *word = &words[random_below(word_count)];
        insert(at, word->bytes, word->count);
    }
}

/* Inserts some bytes of another input. */
static void insert_chunk(size_t at)
{
    const input *other = &corpus[random_below(corpus_count)];
    size_t from = random_below(other->count);
    size_t count = 1 + random_below(other->count - from < 64 ? other->count - from : 64);
    if (from + count <= other->count) {
        insert(at, other->bytes + from, count);
    }
}

/* Replaces a digit by another number, since all text formats have many. */
static void change_number(size_t at)
{
    static const char *const numbers[] = {"0", "1", "2", "-1", "65535", "4294967296", "9223372036854775807", "1e999"};
    for (; at < current_count; at++) {
        if (current[at] >= '0' && current[at] <= '9') {
            const char *number = numbers[random_below(sizeof numbers / sizeof numbers[0])];
            move_rest(at, at + 1);
            insert(at, (const uint8_t *)number, strlen(number));
            return;
        }
    }
}

static void change(void)
{
    size_t at = random_below(current_count + 1);
    size_t end = at + random_below(current_count - at + 1 < 12 ? current_count - at + 1 : 12);
    switch (random_below(8)) {
    case 0: /* one bit */
        current[random_below(current_count)] ^= (uint8_t)(1U << random_below(8));
        break;
    case 1: /* one byte */
        current[random_below(current_count)] = (uint8_t)random_bits();
        break;
    case 2: /* a few bytes less */
        move_rest(at, end);
        break;
    case 3: /* a few bytes twice */
        move_rest(end, at);
        break;
    case 4:
        insert_chunk(at);
        break;
    case 5:
        change_number(at);
        break;
    default:
        insert_word(at);
    }
}

/* --- runs -------------------------------------------------------------------------------------------------------- */

static void take(const input *in)
{
    memcpy(current, in->bytes, in->count);
    current_count = in->count;
}

/* In memory of exactly its size, so that a sanitizer detects reads past the end. */
static void run_current(void)
{
    uint8_t *exact = malloc(current_count > 0 ? current_count : 1);
    REQUIRE(exact != NULL);
    memcpy(exact, current, current_count);
    (void)LLVMFuzzerTestOneInput(exact, current_count);
    free(exact);
}

static void one_round(void)
{
    take(&corpus[random_below(corpus_count)]);
    for (size_t i = 0, changes = 1 + random_below(4); i < changes; i++) {
        change();
    }
    if (random_below(4) != 0) {
        fuzz_repair(current, current_count);
    }
    run_current();
}

static void leave_input(void)
{
    int file = open(crash_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (file >= 0) {
        (void)!write(file, current, current_count);
        close(file);
    }
}

static void on_signal(int number)
{
    leave_input();
    signal(number, SIG_DFL);
    raise(number);
}

/* Sanitizers abort the process themselves. */
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

static void watch(const char *program)
{
    static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};
    const char *slash = strrchr(program, '/');
    const char *name = slash == NULL ? program : slash + 1;
    snprintf(crash_path, sizeof crash_path, "crash-%s", strncmp(name, "fuzz_", 5) == 0 ? name + 5 : name);
    if (__sanitizer_set_death_callback != NULL) {
        __sanitizer_set_death_callback(leave_input);
        signal(SIGALRM, on_signal);
        return;
    }
    for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
        signal(signals[i], on_signal);
    }
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Currently allocated bytes; 0 under sanitizers, which detect leaks themselves. */
static size_t heap_bytes(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}

typedef struct options {
    double seconds; /* of CPU time */
    long long runs;
    uint64_t seed;
} options;

static void fuzz(const options *o)
{
    long long done = 0;
    size_t early = 0;
    double start = seconds_now();
    for (bool more = true; more;) {
        alarm(SECONDS_FOR_A_RUN);
        for (int i = 0; i < 100 && (o->runs == 0 || done < o->runs); i++, done++) {
            one_round();
        }
        early = done == 2000 ? heap_bytes() : early;
        more = o->runs > 0 ? done < o->runs : seconds_now() - start < o->seconds;
    }
    alarm(0);
    printf("%lld changed inputs in %.1f s of processor time with seed %llu\n", done, seconds_now() - start,
           (unsigned long long)o->seed);
    if (early > 0 && heap_bytes() > early + MOST_GROWTH) {
        fprintf(stderr, "the heap has grown from %zu to %zu bytes: something is not freed\n", early, heap_bytes());
        exit(1);
    }
}

int main(int argc, char **argv)
{
    options o = {.seconds = 2.0};
    REQUIRE(getrandom(&o.seed, sizeof o.seed, 0) == (ssize_t)sizeof o.seed);
    for (int i = 1; i < argc; i++) {
        bool valued = i + 1 < argc;
        if (valued && strcmp(argv[i], "--seconds") == 0) {
            o.seconds = strtod(argv[++i], NULL);
        } else if (valued && strcmp(argv[i], "--runs") == 0) {
            o.runs = strtoll(argv[++i], NULL, 10);
        } else if (valued && strcmp(argv[i], "--seed") == 0) {
            o.seed = strtoull(argv[++i], NULL, 0);
        } else if (valued && strcmp(argv[i], "--dictionary") == 0) {
            read_dictionary(argv[++i]);
        } else {
            read_corpus(argv[i]);
        }
    }
    random_state = o.seed;
    printf("seed %llu, %zu inputs, %zu words\n", (unsigned long long)o.seed, corpus_count, word_count);
    fflush(stdout);
    REQUIRE(corpus_count > 0);
    watch(argv[0]);
    for (size_t i = 0; i < corpus_count; i++) {
        take(&corpus[i]);
        alarm(SECONDS_FOR_A_RUN);
        run_current();
    }
    fuzz(&o);
    return 0;
}
