/* NVRTC 13.7 without the compiler; it supports the architectures of FAKE_NVRTC_ARCHS. A source with BE_WRONG does not
 * compile, LACK_HEADER lacks a header, BE_WARNED gets a warning, and no source has a kernel `missing`; everything else
 * succeeds. fake_nvrtc_options and fake_nvrtc_source return its last input. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COMPILATION = 6, CODE_BYTES = 100 };

typedef struct program {
    char source[1 << 16];
    char file[256];
    char lowered[256];
    char log[512];
    int failed;
} program;

static char options[4096];
static char last_source[1 << 16];

const char *fake_nvrtc_options(void)
{
    return options;
}

const char *fake_nvrtc_source(void)
{
    return last_source;
}

int nvrtcVersion(int *major, int *minor)
{
    *major = 13;
    *minor = 7;
    return 0;
}

const char *nvrtcGetErrorString(int status)
{
    return status == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_OTHER";
}

static int architectures_of(int *list)
{
    const char *text = getenv("FAKE_NVRTC_ARCHS");
    int count = 0;
    int used = 0;
    int number = 0;
    for (text = text != NULL ? text : "75 80 90 100"; sscanf(text, "%d%n", &number, &used) == 1; text += used) {
        if (list != NULL) {
            list[count] = number;
        }
        count++;
    }
    return count;
}

int nvrtcGetNumSupportedArchs(int *count)
{
    *count = architectures_of(NULL);
    return 0;
}

int nvrtcGetSupportedArchs(int *architectures)
{
    architectures_of(architectures);
    return 0;
}

int nvrtcCreateProgram(program **made, const char *source, const char *file, int count, const char *const *headers,
                       const char *const *names)
{
    program *p = calloc(1, sizeof *p);
    if (p == NULL || count < 1 || strcmp(names[0], "stdint.h") != 0) {
        free(p);
        return 1;
    }
    snprintf(p->source, sizeof p->source, "%s", source);
    snprintf(p->file, sizeof p->file, "%s", file);
    memcpy(last_source, p->source, sizeof last_source);
    *made = p;
    return 0;
}

int nvrtcDestroyProgram(program **old)
{
    free(*old);
    *old = NULL;
    return 0;
}

int nvrtcAddNameExpression(program *p, const char *name)
{
    snprintf(p->lowered, sizeof p->lowered, "_Z_%s", name);
    return 0;
}

int nvrtcCompileProgram(program *p, int count, const char *const *given)
{
    options[0] = '\0';
    for (int i = 0; i < count; i++) {
        size_t used = strlen(options);
        snprintf(options + used, sizeof options - used, "%s\n", given[i]);
    }
    if (strstr(p->source, "BE_WRONG") != NULL) {
        p->failed = snprintf(p->log, sizeof p->log, "%.200s(3): error: it is wrong\n", p->file);
    } else if (strstr(p->source, "LACK_HEADER") != NULL) {
        p->failed = snprintf(p->log, sizeof p->log,
                             "%.200s(1): catastrophic error: cannot open source file \"cuda_fp16.h\"\n", p->file);
    } else if (strcmp(p->lowered, "_Z_missing") == 0) {
        p->failed = snprintf(
            p->log, sizeof p->log,
            "%.200s(2): warning: unused\nthe kernel's name(84): error: \"missing\" is undefined\n  text\n", p->file);
    } else if (strstr(p->source, "BE_WARNED") != NULL) {
        snprintf(p->log, sizeof p->log, "%.200s(2): warning: unused\n", p->file);
    }
    return p->failed ? COMPILATION : 0;
}

int nvrtcGetLoweredName(program *p, const char *name, const char **lowered)
{
    *lowered = p->lowered;
    return 0;
}

int nvrtcGetProgramLogSize(program *p, size_t *bytes)
{
    *bytes = strlen(p->log) + 1;
    return 0;
}

int nvrtcGetProgramLog(program *p, char *log)
{
    memcpy(log, p->log, strlen(p->log) + 1);
    return 0;
}

int nvrtcGetCUBINSize(program *p, size_t *bytes)
{
    *bytes = CODE_BYTES;
    return 0;
}

int nvrtcGetCUBIN(program *p, char *code)
{
    static const char magic[] = {'\177', 'E', 'L', 'F'};
    memset(code, 7, CODE_BYTES);
    memcpy(code, magic, sizeof magic);
    return 0;
}

int nvrtcGetPTXSize(program *p, size_t *bytes)
{
    return nvrtcGetCUBINSize(p, bytes);
}

int nvrtcGetPTX(program *p, char *code)
{
    snprintf(code, CODE_BYTES, "%-*s", CODE_BYTES - 1, ".version");
    return 0;
}
