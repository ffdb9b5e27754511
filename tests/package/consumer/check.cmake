# Installs the library to a new folder, builds the program of project/ against it in both ways, runs it, moves the
# folder, and repeats. `kind` is shared (the current build's library) or static (an archive of its `objects`). The static
# build is kept, so that a second run rebuilds only changes.
cmake_policy(VERSION 3.25)
set(project "${CMAKE_CURRENT_LIST_DIR}/project")

function(run)
    execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(use_find_package prefix folder)
    run("${CMAKE_COMMAND}" -S "${project}" -B "${folder}" -G "${generator}" "-DCMAKE_C_COMPILER=${cc}"
        "-DCMAKE_PREFIX_PATH=${prefix}" "-Dwanted_version=${version}")
    run("${CMAKE_COMMAND}" --build "${folder}")
    run("${folder}/consumer")
endfunction()

function(use_pkg_config prefix program)
    set(ENV{PKG_CONFIG_PATH} "${prefix}/${libdir}/pkgconfig")
    set(how)
    if(kind STREQUAL "static")
        set(how --static)
    endif()
    execute_process(COMMAND "${pkg_config}" ${how} --cflags --libs "torchium = ${version}" OUTPUT_VARIABLE flags
                    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    separate_arguments(flags UNIX_COMMAND "${flags}")
    run("${cc}" "${project}/main.c" -o "${program}" ${flags} -lm)
    run("${program}")
endfunction()

function(use_everything prefix folder)
    use_find_package("${prefix}" "${folder}/find_package")
    use_pkg_config("${prefix}" "${folder}/through_pkg_config")
    if(command)
        run("${prefix}/bin/torchium" info)
    endif()
endfunction()

file(REMOVE_RECURSE "${work}/installed" "${work}/moved" "${work}/before" "${work}/after")
file(MAKE_DIRECTORY "${work}/before" "${work}/after")
if(kind STREQUAL "static")
    set(build "${work}/build")
    file(WRITE "${work}/objects.cmake" "set(TORCHIUM_OBJECTS \"${objects}\" CACHE STRING \"\" FORCE)\n")
    run("${CMAKE_COMMAND}" -C "${work}/objects.cmake" -S "${source}" -B "${build}" -G "${generator}"
        "-DCMAKE_C_COMPILER=${cc}" -DCMAKE_BUILD_TYPE=Debug -DBUILD_SHARED_LIBS=OFF "-DCMAKE_INSTALL_LIBDIR=${libdir}"
        -DTORCHIUM_CUDA=OFF -DTORCHIUM_BUILD_EXAMPLES=OFF -DTORCHIUM_BUILD_PYTHON=OFF -DTORCHIUM_BUILD_TESTS=OFF
        "-DTORCHIUM_BUILD_CLI=${command}")
    run("${CMAKE_COMMAND}" --build "${build}")
endif()
run("${CMAKE_COMMAND}" --install "${build}" --prefix "${work}/installed")
if(command) # an archive has no such paths
    run("${python}" "${source}/tests/package/test_runpaths.py" "${work}/installed" "${build}/cli")
endif()
use_everything("${work}/installed" "${work}/before")
file(RENAME "${work}/installed" "${work}/moved")
use_everything("${work}/moved" "${work}/after")
