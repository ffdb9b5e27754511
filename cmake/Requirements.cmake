# Checks requirements before CMake does: a sentence that says what to install, instead of a page from CMake. Included
# twice: before project(), when no compiler is known yet, and after it.

set(oldest_gnu 11)
set(oldest_clang 14)

if(NOT CMAKE_C_COMPILER_ID)
    set(compilers cc gcc clang)
    if(CMAKE_C_COMPILER)
        set(compilers "${CMAKE_C_COMPILER}")
    elseif(NOT "$ENV{CC}" STREQUAL "")
        string(REGEX REPLACE " .*" "" compilers "$ENV{CC}")
    endif()
    if(NOT CMAKE_TOOLCHAIN_FILE)
        find_program(torchium_any_compiler NAMES ${compilers} NO_CACHE)
        if(NOT torchium_any_compiler)
            list(JOIN compilers ", " text)
            message(FATAL_ERROR "No C compiler was found (${text}): install gcc ${oldest_gnu} or clang ${oldest_clang} or "
                                "newer (Debian, Ubuntu: apt-get install gcc libc6-dev), or set CC to one.")
        endif()
    endif()
elseif((CMAKE_C_COMPILER_ID STREQUAL "GNU" AND CMAKE_C_COMPILER_VERSION VERSION_LESS oldest_gnu) OR
       (CMAKE_C_COMPILER_ID STREQUAL "Clang" AND CMAKE_C_COMPILER_VERSION VERSION_LESS oldest_clang))
    message(FATAL_ERROR "${CMAKE_C_COMPILER} is ${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}: gcc ${oldest_gnu} or "
                        "clang ${oldest_clang} or newer is needed; set CC to one.")
endif()
