# What every target of this project is compiled with. C17 without extensions, on POSIX; warnings are on everywhere and
# become errors where CMAKE_COMPILE_WARNING_AS_ERROR is set, as the debug and sanitizer presets do. nvcc has warning
# options of its own, which the CUDA module adds.

function(torchium_compile_options target)
    set_target_properties(${target} PROPERTIES C_STANDARD 17 C_STANDARD_REQUIRED ON C_EXTENSIONS OFF)
    target_compile_definitions(${target} PRIVATE _POSIX_C_SOURCE=200809L)
    target_compile_options(${target} PRIVATE
        "$<$<COMPILE_LANGUAGE:C>:-Wall;-Wextra;-pedantic;-Wstrict-prototypes;-Wmissing-prototypes>")
    if(CMAKE_C_COMPILER_ID STREQUAL "GNU")
        # A message that does not fit its buffer is cut, on purpose and everywhere.
        target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:C>:-Wshadow=local;-Wno-format-truncation>")
    endif()
    if(TORCHIUM_SANITIZE)
        target_compile_options(${target} PRIVATE -fsanitize=${TORCHIUM_SANITIZE} -fno-sanitize-recover=all
                                                 -fno-omit-frame-pointer)
        target_link_options(${target} PRIVATE -fsanitize=${TORCHIUM_SANITIZE})
    endif()
endfunction()
