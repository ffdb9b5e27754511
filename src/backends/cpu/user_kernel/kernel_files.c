/* What a compiler has read beside the source: headers of CPATH, of the system, of anywhere. It is kept in the image,
 * and an image from the cache counts only as long as every file is what it was.
 *
 * A file's contents decide. They are not read again where size, times and number are those from before: nobody but the
 * system sets the time of a file's last change. That holds only for a file that had been left alone for a while, since
 * two changes within one tick of the clock look like one. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/sha256.h"
#include "kernel.h"

#define TICK_SECONDS 2 /* of the coarsest clock that a file system has */

/* A file in an image; its name follows, with a NUL. */
typedef struct record {
    uint64_t bytes; /* of all of it, the name included */
    uint64_t size, number;
    int64_t written[2], changed[2]; /* seconds and nanoseconds */
    uint32_t known;                 /* 0: it cannot be told whether this is what the compiler has read */
    uint32_t settled;               /* times tell whether it has changed */
    uint8_t digest[TCHI_SHA256_BYTES];
} record;

/* --- looking at a file ------------------------------------------------------------------------------------------- */

static int hash_open(int file, uint8_t digest[TCHI_SHA256_BYTES])
{
    tchi_sha256_state hash;
    char part[16384];
    ssize_t count;
    tchi_sha256_begin(&hash);
    while ((count = read(file, part, sizeof part)) > 0 || (count < 0 && errno == EINTR)) {
        tchi_sha256_add(&hash, part, count > 0 ? (size_t)count : 0);
    }
    tchi_sha256_end(&hash, digest);
    return count == 0;
}

static int hash_file(const char *path, uint8_t digest[TCHI_SHA256_BYTES])
{
    int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (file < 0) {
        return 0;
    }
    int whole = hash_open(file, digest);
    close(file);
    return whole;
}

/* All but the contents; 0 where it is no file. */
static int look_at(const char *path, record *r)
{
    struct stat about;
    memset(r, 0, sizeof *r);
    if (stat(path, &about) != 0 || !S_ISREG(about.st_mode)) {
        return 0;
    }
    r->size = (uint64_t)about.st_size, r->number = (uint64_t)about.st_ino;
    r->written[0] = about.st_mtim.tv_sec, r->written[1] = about.st_mtim.tv_nsec;
    r->changed[0] = about.st_ctim.tv_sec, r->changed[1] = about.st_ctim.tv_nsec;
    return 1;
}

static int is_later(const int64_t time[2], const struct timespec *than)
{
    return time[0] != than->tv_sec ? time[0] > than->tv_sec : time[1] > than->tv_nsec;
}

/* A file that was changed after the compiler was started may not be what it has read. The times of files are up to a
 * tick, some milliseconds, behind the clock, which is less than a compiler takes before it reads its first header. */
static record describe(const char *path, const struct timespec *started)
{
    record r;
    r.known = look_at(path, &r) && !is_later(r.written, started) && !is_later(r.changed, started) &&
              hash_file(path, r.digest);
    r.settled = r.changed[0] + TICK_SECONDS < started->tv_sec && r.written[0] + TICK_SECONDS < started->tv_sec;
    return r;
}

static int is_same(const char *path, const record *before)
{
    record r;
    if (!before->known || !look_at(path, &r) || r.size != before->size) {
        return 0;
    }
    if (before->settled && r.number == before->number && memcmp(r.written, before->written, sizeof r.written) == 0 &&
        memcmp(r.changed, before->changed, sizeof r.changed) == 0) {
        return 1;
    }
    return hash_file(path, r.digest) && memcmp(r.digest, before->digest, sizeof r.digest) == 0;
}

/* --- the list ---------------------------------------------------------------------------------------------------- */

static tch_status have_room(tchi_cpu_files *files, size_t more)
{
    const tch_backend_host *host = tchi_cpu_host();
    if (files->bytes + more <= files->room) {
        return TCH_OK;
    }
    size_t room = 2 * files->room + more + 4096;
    char *data = host->allocate(room, _Alignof(record));
    if (data == NULL) {
        return host->fail(TCH_ERR_OUT_OF_MEMORY, "out of host memory: %zu bytes for the names of included files", room);
    }
    if (files->data != NULL) {
        memcpy(data, files->data, files->bytes);
        host->release(files->data, files->room);
    }
    files->data = data, files->room = room;
    return TCH_OK;
}

static tch_status add_file(tchi_cpu_files *files, const char *path, record r)
{
    size_t name = strlen(path) + 1;
    r.bytes = sizeof r + name;
    tch_status status = have_room(files, r.bytes);
    if (status == TCH_OK) {
        memcpy(files->data + files->bytes, &r, sizeof r);
        memcpy(files->data + files->bytes + sizeof r, path, name);
        files->bytes += r.bytes;
    }
    return status;
}

int tchi_cpu_files_same(const char *data, size_t bytes)
{
    record r;
    while (bytes > 0) {
        if (bytes < sizeof r) {
            return 0;
        }
        memcpy(&r, data, sizeof r);
        if (r.bytes <= sizeof r || r.bytes > bytes || data[r.bytes - 1] != '\0' || !is_same(data + sizeof r, &r)) {
            return 0;
        }
        data += r.bytes, bytes -= r.bytes;
    }
    return 1;
}

void tchi_cpu_files_release(tchi_cpu_files *files)
{
    if (files->data != NULL) {
        tchi_cpu_host()->release(files->data, files->room);
    }
    *files = (tchi_cpu_files){NULL, 0, 0};
}

/* --- the compiler's list ----------------------------------------------------------------------------------------- */

/* A name under way; what does not fit is counted only. */
typedef struct name_writer {
    char *name;
    size_t used;
} name_writer;

static void put(name_writer *w, char c, size_t times)
{
    for (; times > 0; times--, w->used++) {
        if (w->used + 1 < PATH_MAX) {
            w->name[w->used] = c;
        }
    }
}

static int is_blank(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* What a run of backslashes means goes by what follows: before a blank two stand for one and a single one for the
 * blank, one before # or : stands for nothing, one before the end of a line goes on with the next, and all others are
 * part of the name. Returns the place behind; *over where the name ends there. */
static const char *read_backslashes(const char *p, name_writer *w, int *over)
{
    size_t count = strspn(p, "\\");
    char next = p[count];
    int quotes = next == ' ' || next == '\t' ? count % 2 != 0 : next == '#' || next == ':';
    *over = is_blank(next) && !quotes;
    put(w, '\\', next == ' ' || next == '\t' ? count / 2 : quotes || next == '\n' ? count - 1 : count);
    if (quotes) {
        put(w, next, 1);
    }
    return p + count + quotes;
}

/* The next name of a rule; 0 at the end, -1 where it does not fit. */
static int next_name(const char **rule, char name[PATH_MAX])
{
    name_writer w = {name, 0};
    const char *p = *rule;
    int over = 0;
    while (is_blank(*p) || (*p == '\\' && p[1] == '\n')) {
        p++;
    }
    while (*p != '\0' && !is_blank(*p) && !over) {
        if (*p == '\\') {
            p = read_backslashes(p, &w, &over);
        } else {
            p += *p == '$' && p[1] == '$';
            put(&w, *p++, 1);
        }
    }
    *rule = p;
    name[w.used < PATH_MAX ? w.used : PATH_MAX - 1] = '\0';
    return w.used >= PATH_MAX ? -1 : w.used > 0;
}

/* Names without a slash in front are the compiler's, which runs in our folder. */
static int make_absolute(char name[PATH_MAX])
{
    char here[PATH_MAX], whole[2 * PATH_MAX];
    if (name[0] == '/') {
        return 1;
    }
    if (getcwd(here, sizeof here) == NULL || snprintf(whole, sizeof whole, "%s/%s", here, name) >= PATH_MAX) {
        return 0;
    }
    memcpy(name, whole, strlen(whole) + 1);
    return 1;
}

static tch_status add_unknown(tchi_cpu_files *files)
{
    return add_file(files, "", (record){.known = 0});
}

static tch_status add_named(tchi_cpu_files *files, char name[PATH_MAX], const char *folder,
                            const struct timespec *started)
{
    size_t length = strlen(folder);
    if (!make_absolute(name)) {
        return add_unknown(files);
    }
    if (strncmp(name, folder, length) == 0 && name[length] == '/') {
        return TCH_OK;
    }
    return add_file(files, name, describe(name, started));
}

tch_status tchi_cpu_files_make(tchi_cpu_files *files, const char *rule, const char *folder,
                               const struct timespec *started)
{
    char name[PATH_MAX];
    const char *at = rule != NULL ? strchr(rule, ':') : NULL;
    int found = 1;
    *files = (tchi_cpu_files){NULL, 0, 0};
    if (at == NULL) {
        return add_unknown(files);
    }
    tch_status status = TCH_OK;
    for (at++; status == TCH_OK && (found = next_name(&at, name)) > 0;) {
        status = add_named(files, name, folder, started);
    }
    return status == TCH_OK && found < 0 ? add_unknown(files) : status;
}
