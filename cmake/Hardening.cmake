# Hardening options of optimized builds: SECURITY.md has the list, with the cost of each, and the test `hardened` checks
# the built files. Sanitizers have their own checks, with which these would interfere. Sets TORCHIUM_HARDEN_COMPILE and
# TORCHIUM_HARDEN_LINK, options of the compiler driver.
include(CheckCCompilerFlag)
include(CheckLinkerFlag)
include(CheckPIESupported)

option(TORCHIUM_HARDEN "Compile optimized builds with stack protector, FORTIFY, and read-only tables" ON)
set(TORCHIUM_HARDEN_COMPILE)
set(TORCHIUM_HARDEN_LINK)
check_pie_supported(LANGUAGES C)

if(TORCHIUM_HARDEN AND NOT TORCHIUM_SANITIZE)
    # Only the branch half of -fcf-protection: kernels' threads have their own stacks, between which kernel_fibers.c
    # returns, and a shadow stack does not support that.
    foreach(option -fstack-protector-strong -fcf-protection=branch -mbranch-protection=standard)
        string(MAKE_C_IDENTIFIER "torchium_takes${option}" takes)
        check_c_compiler_flag(${option} ${takes})
        if(${takes})
            list(APPEND TORCHIUM_HARDEN_COMPILE ${option})
        endif()
    endforeach()
    # Level 3 also checks sizes known only at run time, and with it all of this costs small steps 3.7 %, with 2 it is
    # 0.7 %: docs/reliability.md. Some distributions define it themselves.
    list(APPEND TORCHIUM_HARDEN_COMPILE -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)
    foreach(option relro now noexecstack)
        check_linker_flag(C "LINKER:-z,${option}" torchium_links_${option})
        if(torchium_links_${option})
            list(APPEND TORCHIUM_HARDEN_LINK "LINKER:-z,${option}")
        endif()
    endforeach()
endif()

# Only in optimized builds; without optimization FORTIFY only warns.
function(torchium_harden target)
    set(optimized "$<CONFIG:Release,RelWithDebInfo,MinSizeRel>")
    if(TORCHIUM_HARDEN_COMPILE)
        target_compile_options(${target} PRIVATE
            "$<$<AND:${optimized},$<COMPILE_LANGUAGE:C>>:${TORCHIUM_HARDEN_COMPILE}>")
    endif()
    target_link_options(${target} PRIVATE ${TORCHIUM_HARDEN_LINK})
endfunction()
