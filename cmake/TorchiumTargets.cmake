# Compiler options of all targets. C17 without extensions, on POSIX; warnings are always on and become errors with
# CMAKE_COMPILE_WARNING_AS_ERROR, as in the debug and sanitizer presets. The CUDA module adds nvcc's warning options.

# GCC 12.1 and 12.2 for aarch64 crash at -O3 ("internal compiler error: in vect_transform_reduction") on max or min
# reductions over numbers narrower than the result, such as w = fmax(w, (double)x[i]) over floats: GCC bug 108608, fixed
# in 12.3. Without the builtins such loops call the C library instead, and nothing else is compiled differently; no such
# loop is performance-critical.
set(TORCHIUM_FMAX_BREAKS_COMPILER OFF)
if(CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$"
        AND CMAKE_C_COMPILER_VERSION VERSION_GREATER_EQUAL 12 AND CMAKE_C_COMPILER_VERSION VERSION_LESS 12.3)
    set(TORCHIUM_FMAX_BREAKS_COMPILER ON)
endif()

function(torchium_compile_options target)
    set_target_properties(${target} PROPERTIES C_STANDARD 17 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
    target_compile_definitions(${target} PRIVATE _POSIX_C_SOURCE=200809L)
    # Operation tables, optimizers and tests determine function signatures, and few functions need every argument.
    target_compile_options(${target} PRIVATE
        "$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-pedantic;-Wstrict-prototypes;-Wmissing-prototypes;-Wno-unused-parameter>")
    if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
        # Messages that exceed their buffers are truncated on purpose.
        target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C>:-Wshadow=local;-Wno-format-truncation>")
    endif()
    if(CMAKE_C_COMPILER_ID MATCHES "Clang")
        # It warns of each "omp simd" loop that it does not vectorize, such as the maximum of floats that may be NaN.
        target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C>:-Wno-pass-failed>")
    endif()
    if(TORCHIUM_FMAX_BREAKS_COMPILER)
        target_compile_options(${target} PRIVATE
            "$<$<COMPILE_LANGUAGE:C>:-fno-builtin-fmax;-fno-builtin-fmaxf;-fno-builtin-fmin;-fno-builtin-fminf>")
    endif()
    torchium_harden(${target})
    if(TORCHIUM_SANITIZE)
        target_compile_options(${target} PRIVATE -fsanitize=${TORCHIUM_SANITIZE} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
        target_link_options(${target} PRIVATE -fsanitize=${TORCHIUM_SANITIZE})
    endif()
    if(TORCHIUM_FUZZER) # coverage for libFuzzer; the targets link its main
        target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C>:-fsanitize=fuzzer-no-link>")
    endif()
endfunction()

# torchium_rpath(TARGET BUILT folder INSTALLED folder [OPTIONS option...]): the RUNPATH of a file linked to the library,
# relative to itself: the folder BUILT of the build tree, and INSTALLED below the prefix. CMake would leave a colon at
# the end of the first, and an empty entry is the current folder, where anyone may have put a library. So the file is
# linked with both paths, and the installed copy keeps its own. OPTIONS are those of install().
function(torchium_rpath target)
    cmake_parse_arguments(PARSE_ARGV 1 arg "" "BUILT;INSTALLED" "OPTIONS")
    get_target_property(folder torchium LIBRARY_OUTPUT_DIRECTORY)
    if(NOT folder)
        get_target_property(folder torchium BINARY_DIR)
    endif()
    file(RELATIVE_PATH built "${arg_BUILT}" "${folder}")
    file(RELATIVE_PATH installed "/prefix/${arg_INSTALLED}" "/prefix/${CMAKE_INSTALL_LIBDIR}")
    set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON
        INSTALL_RPATH "$ORIGIN/${built};$ORIGIN/${installed}")
    install(CODE "file(RPATH_SET NEW_RPATH \"$ORIGIN/${installed}\"
        FILE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${arg_INSTALLED}/$<TARGET_FILE_NAME:${target}>\")" ${arg_OPTIONS})
endfunction()
