/* A source that contains "#error" does not compile. */
#define _XOPEN_SOURCE 700
#include "fake_compiler.h"

#include <dirent.h>
#include <ftw.h>
#include <sys/stat.h>

#include "core/allocator.h"
#include "core/context.h"
#include "core/status.h"
#include "support/backend/table_copy.h"
#include "support/files.h"
#include "support/testing.h"

#define MAGIC "FAKE"

fake_compiler fake;
static table_copy table;
static int handle;

/* No parameters, "fake 1", 1024 threads, nothing seen. */
static void fake_compiler_reset(void)
{
    memset(&fake, 0, sizeof fake);
    snprintf(fake.line, sizeof fake.line, "fake 1");
    fake.max_threads = 1024;
}

static tch_status compiler(void *state, char *text, size_t size)
{
    if (fake.line[0] == '\0') {
        return tchi_fail(TCH_ERR_UNAVAILABLE, "there is no fake compiler: install one");
    }
    snprintf(text, size, "%s", fake.line);
    return TCH_OK;
}

static void write_down(const tch_kernel_text *text)
{
    size_t used = (size_t)snprintf(fake.asked, sizeof fake.asked, "file %s\nname %s\n", text->file, text->name);
    for (int32_t i = 0; i < text->option_count && used < sizeof fake.asked; i++) {
        used += (size_t)snprintf(fake.asked + used, sizeof fake.asked - used, "option %s\n", text->options[i]);
    }
    for (int32_t i = 0; i < text->include_count && used < sizeof fake.asked; i++) {
        used += (size_t)snprintf(fake.asked + used, sizeof fake.asked - used, "include %s\n", text->includes[i]);
    }
}

static tch_status build(void *state, const tch_kernel_text *text, tch_kernel_image *image, char *log, size_t log_size)
{
    fake.builds++;
    write_down(text);
    snprintf(log, log_size, "%s:1: warning: it is only pretended\n", text->file);
    if (strstr(text->source, "#error") != NULL) {
        snprintf(log, log_size, "%s:1: error: it says so itself\n", text->file);
        return tchi_fail(TCH_ERR_INVALID_ARGUMENT, "it failed");
    }
    size_t bytes = strlen(MAGIC) + strlen(text->source) + 1;
    bytes = bytes < fake.image_bytes ? fake.image_bytes : bytes;
    char *data = tchi_host_allocate(bytes, 16);
    if (data == NULL) {
        return tchi_fail(TCH_ERR_OUT_OF_MEMORY, "no memory for a fake image");
    }
    memset(data, 0, bytes);
    snprintf(data, bytes, "%s%s", MAGIC, text->source);
    *image = (tch_kernel_image){data, bytes};
    return TCH_OK;
}

static tch_status load(void *state, const tch_kernel_image *image, void **kernel, tch_kernel_info *info, int32_t room,
                       tch_kernel_parameter *into)
{
    if (fake.refuses_load > 0 || image->bytes < 4 || memcmp(image->data, MAGIC, 4) != 0) {
        fake.refuses_load--;
        return tchi_fail(TCH_ERR_IO, "the fake image is damaged");
    }
    fake.loads++;
    *kernel = &handle;
    info->parameters = fake.parameter_count;
    info->max_threads = fake.max_threads;
    info->suggested_threads = 256;
    for (int32_t i = 0; i < fake.parameter_count && i < room && i < FAKE_VALUES; i++) {
        into[i] = fake.parameters[i];
    }
    return TCH_OK;
}

static void unload(void *state, void *kernel)
{
    fake.unloads += kernel == &handle;
}

static tch_status launch(void *state, void *kernel, const tch_kernel_run *run)
{
    fake.launches++;
    fake.run = *run;
    for (int32_t i = 0; i < fake.parameter_count; i++) {
        size_t size = (size_t)fake.parameters[i].size;
        memset(fake.values[i], 0xee, FAKE_VALUE_SIZE);
        memcpy(fake.values[i], run->arguments[i], size < FAKE_VALUE_SIZE ? size : FAKE_VALUE_SIZE);
    }
    return TCH_OK;
}

int real_compiler_open(void **state)
{
    return test_folder_make(state) == 0 && setenv("TORCHIUM_CACHE", test_path("cache"), 1) == 0
               ? test_open_context(state)
               : -1;
}

int fake_compiler_open(void **state)
{
    tch_context *context = NULL;
    fake_compiler_reset();
    if (test_folder_make(state) != 0 || tch_context_create("cpu", &context) != TCH_OK ||
        setenv("TORCHIUM_CACHE", test_path("cache"), 1) != 0) {
        return -1;
    }
    table_copy_make(&table, context->backend);
    table.kernel.compiler = compiler;
    table.kernel.build = build;
    table.kernel.load = load;
    table.kernel.unload = unload;
    table.kernel.launch = launch;
    context->backend = &table.backend;
    *state = context;
    return 0;
}

int fake_compiler_close(void **state)
{
    test_release(state);
    tch_context_destroy(*state);
    fake_remove_tree(test_path(".")); /* all but the folder itself: rmdir takes no path that ends in a dot */
    return test_folder_remove(state);
}

tch_kernel_parameter fake_number(tch_parameter_class what, int32_t size)
{
    return (tch_kernel_parameter){.what = what, .size = size, .pointee = TCH_PARAMETER_OTHER};
}

tch_kernel_parameter fake_pointer(tch_parameter_class pointee, int32_t size)
{
    return (tch_kernel_parameter){
        .what = TCH_PARAMETER_POINTER, .size = sizeof(void *), .pointee = pointee, .pointee_size = size};
}

const char *fake_cache(void)
{
    return test_path("cache");
}

static int ends_with(const char *name, const char *suffix)
{
    size_t length = strlen(name);
    return length >= strlen(suffix) && strcmp(name + length - strlen(suffix), suffix) == 0;
}

static int visit(const char *suffix, char *last, size_t size)
{
    int count = 0;
    DIR *folder = opendir(fake_cache());
    if (folder == NULL) {
        return -1;
    }
    for (const struct dirent *found = readdir(folder); found != NULL; found = readdir(folder)) {
        if (found->d_name[0] != '.' || strncmp(found->d_name, ".torchium", 9) == 0) {
            count += ends_with(found->d_name, suffix);
            snprintf(last, size, "%s", found->d_name);
        }
    }
    closedir(folder);
    return count;
}

int fake_cache_count(const char *suffix)
{
    char last[300];
    return visit(suffix, last, sizeof last);
}

const char *fake_cache_entry(void)
{
    char last[300], name[320];
    if (visit("", last, sizeof last) != 1) {
        return NULL;
    }
    snprintf(name, sizeof name, "cache/%s", last);
    return test_path(name);
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    return remove(path);
}

void fake_remove_tree(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

int fake_compile(tch_context *context, tch_kernel_config *config)
{
    tch_kernel *kernel = NULL;
    tch_kernel_info info = TCH_KERNEL_INFO_INIT;
    int before = fake.builds;
    CHECK_OK(tch_kernel_compile(context, config, &kernel));
    CHECK_OK(tch_kernel_get_info(kernel, &info));
    tch_kernel_destroy(kernel);
    CHECK(fake.builds - before == !info.from_cache, "from_cache is %d after %d builds", info.from_cache,
          fake.builds - before);
    CHECK(fake.loads == fake.unloads, "%d loads, %d unloads", fake.loads, fake.unloads);
    return fake.builds - before;
}

tch_kernel_config fake_config(const char *source)
{
    tch_kernel_config config = TCH_KERNEL_CONFIG_INIT;
    config.source = source;
    config.name = "f";
    return config;
}

tch_kernel *fake_kernel(tch_context *context, const char *name)
{
    tch_kernel *kernel = NULL;
    tch_kernel_config config = fake_config(FAKE_SOURCE);
    config.name = name;
    CHECK_OK(tch_kernel_compile(context, &config, &kernel));
    return kernel;
}

int fake_compile_text(tch_context *context, const char *source)
{
    tch_kernel_config config = fake_config(source);
    return fake_compile(context, &config);
}
