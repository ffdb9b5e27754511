# What makes a mistake in C harder to turn into an attack, in optimized builds: SECURITY.md has the list, with what each
# costs, and the test `hardened` reads the built files. Sanitizers have checks of their own, which these would disturb.
# Sets TORCHIUM_HARDEN_COMPILE and TORCHIUM_HARDEN_LINK, the options that the compiler takes.
include(CheckCCompilerFlag)
include(CheckLinkerFlag)
include(CheckPIESupported)

option(TORCHIUM_HARDEN "Compile optimized builds with stack protector, FORTIFY, and read-only tables" ON)
set(TORCHIUM_HARDEN_COMPILE)
set(TORCHIUM_HARDEN_LINK)
check_pie_supported(LANGUAGES C)

if(TORCHIUM_HARDEN AND NOT TORCHIUM_SANITIZE)
    # Of -fcf-protection only the half for jumps: kernels' threads have stacks of their own, between which
    # kernel_fibers.c returns, and a shadow stack would not know them.
    foreach(option -fstack-protector-strong -fcf-protection=branch -mbranch-protection=standard)
        string(MAKE_C_IDENTIFIER "torchium_takes${option}" takes)
        check_c_compiler_flag(${option} ${takes})
        if(${takes})
            list(APPEND TORCHIUM_HARDEN_COMPILE ${option})
        endif()
    endforeach()
    # Level 3 also looks for sizes that are known at run time alone, and with it all of this costs small steps
    # 3.7 %, with 2 it is 0.7 %: docs/reliability.md. Some distributions define it themselves.
    list(APPEND TORCHIUM_HARDEN_COMPILE -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2)
    foreach(option relro now noexecstack)
        check_linker_flag(C "LINKER:-z,${option}" torchium_links_${option})
        if(torchium_links_${option})
            list(APPEND TORCHIUM_HARDEN_LINK "LINKER:-z,${option}")
        endif()
    endforeach()
endif()

# Only where the compiler optimizes, without which FORTIFY has no effect but a warning.
function(torchium_harden target)
    set(optimized "$<CONFIG:Release,RelWithDebInfo,MinSizeRel>")
    if(TORCHIUM_HARDEN_COMPILE)
        target_compile_options(${target} PRIVATE
            "$<$<AND:${optimized},$<COMPILE_LANGUAGE:C>>:${TORCHIUM_HARDEN_COMPILE}>")
    endif()
    target_link_options(${target} PRIVATE ${TORCHIUM_HARDEN_LINK})
endfunction()
