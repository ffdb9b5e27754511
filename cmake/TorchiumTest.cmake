# Building and running tests: linking, environment of the sanitizers, labels, timeouts.

# Programs are in one folder, so that a test is found by its name and libraries next to it; replacements of libraries or
# modules are in subfolders.
set(test_programs "${PROJECT_BINARY_DIR}/tests")
set(test_modules "${test_programs}/modules")
set(support_folder "${PROJECT_SOURCE_DIR}/tests/support")

# gcc 12's sanitizers place their shadow memory at fixed addresses, which conflicts with newer kernels' wider address
# randomization; tests run without randomization if permitted.
set(test_launcher)
if(TORCHIUM_SANITIZE)
    execute_process(COMMAND setarch -R true RESULT_VARIABLE setarch_failed OUTPUT_QUIET ERROR_QUIET)
    if(NOT setarch_failed)
        set(test_launcher setarch -R)
    endif()
endif()

# Waiting threads sleep: on a busy machine spinning threads make a test several times slower.
# Under AddressSanitizer oversized allocations must fail as usual. Compiled kernels stay out of the user's cache.
set(test_environment "OMP_WAIT_POLICY=passive" "TORCHIUM_CACHE=${PROJECT_BINARY_DIR}/kernel-cache"
    "UBSAN_OPTIONS=print_stacktrace=1"
    "ASAN_OPTIONS=allocator_may_return_null=1:intercept_tls_get_addr=0" "TSAN_OPTIONS=allocator_may_return_null=1")
if(TORCHIUM_SANITIZE MATCHES "address" AND CMAKE_C_COMPILER_ID MATCHES "Clang")
    file(WRITE "${PROJECT_BINARY_DIR}/leaks.txt" "leak:libomp.so\n") # clang's OpenMP runtime keeps its threads' memory
    list(APPEND test_environment "LSAN_OPTIONS=suppressions=${PROJECT_BINARY_DIR}/leaks.txt:print_suppressions=0")
endif()
if(TORCHIUM_SANITIZE MATCHES "thread")
    # libgomp is not instrumented, so its barriers look like races: only the library's own threads are tested.
    list(APPEND test_environment "OMP_NUM_THREADS=1")
endif()

# On aarch64 an empty program takes 4.4 seconds under GCC 12's AddressSanitizer: its leak check iterates several times
# over a map of 2^28 regions (perf: 98 % in __lsan::ForEachChunk). There only tests that create, fail to create and
# destroy one of everything check for leaks; on x86-64, where it costs nothing, every test does.
set(slow_leak_search OFF)
set(leak_searched "^(checkpoint|checkpoint_faults|datasets|example_07_train_network|kernel|kernel_cache|oom|\
optim_memory|recording|registry)$")
if(TORCHIUM_SANITIZE MATCHES "address" AND CMAKE_C_COMPILER_ID STREQUAL "GNU"
        AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$")
    set(slow_leak_search ON)
endif()

# A kernel that hangs must not hold a borrowed GPU for long.
set(gpu_test_timeout 120)

function(torchium_test_settings name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "LABELS")
    set(environment ${test_environment})
    if(slow_leak_search AND NOT name MATCHES "${leak_searched}")
        list(TRANSFORM environment APPEND ":detect_leaks=0" REGEX "^ASAN_OPTIONS=")
    endif()
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 300)
    endif()
    set_tests_properties(${name} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
        ENVIRONMENT "${environment}" SKIP_RETURN_CODE 77) # support/testing.h: TEST_SKIPPED
endfunction()

# A program test_NAME from test_NAME.c. Libraries are found relative to it, so that a build folder can be copied to a
# machine with a GPU.
function(torchium_test_program name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "INTERNAL" "" "SUPPORT;SOURCES")
    list(TRANSFORM arg_SUPPORT PREPEND "${support_folder}/")
    add_executable(test_${name} test_${name}.c ${arg_SUPPORT} ${arg_SOURCES})
    torchium_compile_options(test_${name})
    set_target_properties(test_${name} PROPERTIES BUILD_RPATH_USE_ORIGIN ON BUILD_RPATH "$ORIGIN"
        RUNTIME_OUTPUT_DIRECTORY "${test_programs}")
    if(arg_INTERNAL)
        target_link_libraries(test_${name} PRIVATE test_support torchium_internal)
    else()
        target_link_libraries(test_${name} PRIVATE test_support torchium::torchium)
    endif()
endfunction()

# The tests of ThreadSanitizer, so that nothing else has to be built for it.
if(NOT TARGET thread_tests)
    add_custom_target(thread_tests)
endif()

# torchium_test(NAME [INTERNAL] [DEVICES] [NUMERICAL] [LABELS label...] [SUPPORT file.c...] [SOURCES more.c...] [TIMEOUT
# seconds]): see tests/CMakeLists.txt.
function(torchium_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "INTERNAL;DEVICES;NUMERICAL" "TIMEOUT" "LABELS;SUPPORT;SOURCES")
    if(arg_NUMERICAL AND TORCHIUM_SANITIZE)
        return()
    endif()
    set(internal)
    if(arg_INTERNAL)
        set(internal INTERNAL)
    endif()
    torchium_test_program(${name} ${internal} SUPPORT ${arg_SUPPORT} SOURCES ${arg_SOURCES})
    add_test(NAME ${name} COMMAND ${test_launcher} $<TARGET_FILE:test_${name}>)
    torchium_test_settings(${name} LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
    if("threads" IN_LIST arg_LABELS)
        add_dependencies(thread_tests test_${name})
    endif()
    if(arg_DEVICES AND TORCHIUM_HAVE_CUDA)
        add_test(NAME ${name}_cuda COMMAND ${test_launcher} $<TARGET_FILE:test_${name}> cuda)
        torchium_test_settings(${name}_cuda LABELS gpu TIMEOUT ${gpu_test_timeout})
        if(arg_INTERNAL) # the library is linked in: the module is not next to it
            set_property(TEST ${name}_cuda APPEND PROPERTY
                ENVIRONMENT "TORCHIUM_BACKEND_PATH=$<TARGET_FILE_DIR:torchium_cuda>")
        endif()
    endif()
endfunction()

# torchium_cuda_test(NAME): a GPU-only test, which may call CUDA's runtime. Only if the CUDA module is built.
function(torchium_cuda_test name)
    torchium_test_program(${name})
    target_link_libraries(test_${name} PRIVATE CUDA::cudart_static)
    add_test(NAME ${name} COMMAND ${test_launcher} $<TARGET_FILE:test_${name}> cuda)
    torchium_test_settings(${name} LABELS gpu TIMEOUT ${gpu_test_timeout})
endfunction()

# torchium_python_test(NAME FILES chapter/name... [TIMEOUT seconds]): the files tests/python/chapter/test_name.py, run
# by one pytest on the package of the build tree as python_NAME; and, if the CUDA module is built, their GPU tests as
# python_NAME_cuda. Files share a process because loading PyTorch takes seconds.
function(torchium_python_test name)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT" "FILES")
    set(folder "${PROJECT_SOURCE_DIR}/tests/python")
    if(NOT arg_TIMEOUT)
        set(arg_TIMEOUT 900) # several files, and they compile kernels
    endif()
    list(TRANSFORM arg_FILES REPLACE "(.+)/(.+)" "${folder}/\\1/test_\\2.py")
    set(command ${test_launcher} "${Python3_EXECUTABLE}" "${folder}/run.py" -q -p no:cacheprovider ${arg_FILES})
    set(environment "PYTHONPATH=${PROJECT_BINARY_DIR}/python" "PYTHONDONTWRITEBYTECODE=1")
    add_test(NAME python_${name} COMMAND ${command} -m "not gpu")
    torchium_test_settings(python_${name} TIMEOUT ${arg_TIMEOUT})
    set_property(TEST python_${name} APPEND PROPERTY ENVIRONMENT ${environment})
    set_property(TEST python_${name} PROPERTY COST 100) # the longest tests begin first
    if(TORCHIUM_HAVE_CUDA)
        add_test(NAME python_${name}_cuda COMMAND ${command} -m gpu)
        torchium_test_settings(python_${name}_cuda LABELS gpu TIMEOUT 600)
        set_property(TEST python_${name}_cuda APPEND PROPERTY ENVIRONMENT ${environment})
    endif()
endfunction()

# torchium_test_module(TARGET FOLDER folder SUPPORT file.c | SOURCE file.c [NAME name]): a file of support/, or any
# other, as a loadable module <build>/tests/modules/FOLDER/libNAME.so; NAME is torchium_cuda by default. The macro
# TEST_MODULES has that folder.
function(torchium_test_module target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "FOLDER;SUPPORT;SOURCE;NAME" "DEFINITIONS")
    if(NOT arg_NAME)
        set(arg_NAME torchium_cuda)
    endif()
    if(arg_SUPPORT)
        set(arg_SOURCE "${support_folder}/${arg_SUPPORT}")
    endif()
    add_library(${target} MODULE "${arg_SOURCE}")
    torchium_compile_options(${target})
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/include")
    target_compile_definitions(${target} PRIVATE ${arg_DEFINITIONS})
    set_target_properties(${target} PROPERTIES
        OUTPUT_NAME ${arg_NAME} LIBRARY_OUTPUT_DIRECTORY "${test_modules}/${arg_FOLDER}")
endfunction()

# torchium_test_library(CHAPTER/TARGET FOLDER folder NAME file): support/CHAPTER/TARGET.c as a fake of another library,
# built as <build>/tests/modules/FOLDER/NAME.
function(torchium_test_library source)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "FOLDER;NAME" "")
    cmake_path(GET source FILENAME target)
    add_library(${target} MODULE "${support_folder}/${source}.c")
    torchium_compile_options(${target})
    target_compile_options(${target} PRIVATE -Wno-missing-prototypes) # another library's names, found by dlsym
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
    target_link_options(${target} PRIVATE "-Wl,-soname,${arg_NAME}")
    set_target_properties(${target} PROPERTIES PREFIX "" OUTPUT_NAME "${arg_NAME}" SUFFIX ""
        LIBRARY_OUTPUT_DIRECTORY "${test_modules}/${arg_FOLDER}")
endfunction()
