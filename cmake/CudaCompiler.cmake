# Whether the CUDA module is built, and for which GPUs. Only nvcc and the CUDA runtime are needed to build it: cuBLAS and
# cuSOLVER are opened at run time. Sets TORCHIUM_HAVE_CUDA, and cuda_summary, the line of the summary.

set(TORCHIUM_CUDA AUTO CACHE STRING "Build the CUDA module: AUTO (where nvcc is found), ON or OFF")
set_property(CACHE TORCHIUM_CUDA PROPERTY STRINGS AUTO ON OFF)
# 90a: the kernels for Hopper use instructions of its own. Code for the newest is kept as PTX too, for what comes after.
set(TORCHIUM_CUDA_ARCHITECTURES "75-real;80-real;86-real;89-real;90a-real;100-real;120" CACHE STRING
    "GPUs to build for, as in CMAKE_CUDA_ARCHITECTURES")

# The first that knows all of these GPUs, and has cudaStreamGetDevice.
set(oldest_toolkit 12.8)

# Sets `nvcc` to the compiler, or to a false value with the reason in `why`.
function(torchium_find_nvcc)
    find_program(TORCHIUM_NVCC nvcc HINTS ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda /opt/cuda PATH_SUFFIXES bin
                 DOC "The CUDA compiler")
    mark_as_advanced(TORCHIUM_NVCC)
    set(compiler "${TORCHIUM_NVCC}")
    if(CMAKE_CUDA_COMPILER)
        set(compiler "${CMAKE_CUDA_COMPILER}")
    elseif(NOT "$ENV{CUDACXX}" STREQUAL "")
        set(compiler "$ENV{CUDACXX}")
    endif()
    set(nvcc "" PARENT_SCOPE)
    if(NOT compiler)
        set(why "no nvcc was found (looked in PATH, CUDA_PATH and /usr/local/cuda)" PARENT_SCOPE)
        return()
    endif()
    execute_process(COMMAND "${compiler}" --version OUTPUT_VARIABLE text ERROR_QUIET)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" found "${text}")
    if(NOT found)
        set(why "${compiler} does not tell its version" PARENT_SCOPE)
    elseif(CMAKE_MATCH_1 VERSION_LESS oldest_toolkit)
        set(why "${compiler} is of CUDA ${CMAKE_MATCH_1}, ${oldest_toolkit} or newer is needed" PARENT_SCOPE)
    else()
        set(nvcc "${compiler}" PARENT_SCOPE)
    endif()
endfunction()

# A compiler that is there but cannot be used, such as one that refuses the host compiler, must not end an AUTO build.
macro(torchium_decide_cuda)
    torchium_find_nvcc()
    if(nvcc AND NOT CMAKE_CUDA_COMPILER)
        set(ENV{CUDACXX} "${nvcc}")
        include(CheckLanguage)
        check_language(CUDA)
        if(NOT CMAKE_CUDA_COMPILER)
            set(why "${nvcc} does not compile here (see CMakeFiles/CMakeError.log)")
        endif()
    endif()
    if(nvcc AND CMAKE_CUDA_COMPILER)
        set(TORCHIUM_HAVE_CUDA ON)
    elseif(TORCHIUM_CUDA STREQUAL "AUTO")
        set(cuda_summary "not built: ${why}")
    else()
        message(FATAL_ERROR "TORCHIUM_CUDA is ON, but ${why}. Install the CUDA toolkit, or set CUDACXX to its nvcc.")
    endif()
endmacro()

set(TORCHIUM_HAVE_CUDA OFF)
set(cuda_summary "not built: TORCHIUM_CUDA is OFF")
if(TORCHIUM_CUDA AND TORCHIUM_SANITIZE)
    set(cuda_summary "not built: the sanitizers cannot look into it")
elseif(TORCHIUM_CUDA)
    torchium_decide_cuda()
endif()

if(TORCHIUM_HAVE_CUDA)
    set(CMAKE_CUDA_ARCHITECTURES ${TORCHIUM_CUDA_ARCHITECTURES})
    enable_language(CUDA)
    list(JOIN TORCHIUM_CUDA_ARCHITECTURES " " architectures)
    set(cuda_summary "module for ${architectures}, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
endif()
