# The installed package: headers, library, command, find_package(torchium) and pkg-config. Every path is relative to its
# file's folder, so that an installation can be moved.
include(CMakePackageConfigHelpers)

set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/torchium")
get_property(public_headers GLOBAL PROPERTY torchium_public_headers)

foreach(header IN LISTS public_headers)
    file(RELATIVE_PATH place "${PROJECT_SOURCE_DIR}/include" "${header}")
    cmake_path(GET place PARENT_PATH place)
    install(FILES "${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/${place}")
endforeach()
if(SKBUILD) # a wheel has no symbolic links: a single file without a version in its name
    set_property(TARGET torchium PROPERTY VERSION)
    set_property(TARGET torchium PROPERTY SOVERSION)
endif()
install(TARGETS torchium EXPORT torchium-targets
        LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
        ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
if(TORCHIUM_HAVE_CUDA) # next to the library, which looks for it there
    install(TARGETS torchium_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
install(EXPORT torchium-targets NAMESPACE torchium:: DESTINATION "${package_folder}")

configure_package_config_file(cmake/torchium-config.cmake.in torchium-config.cmake
                              INSTALL_DESTINATION "${package_folder}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/torchium-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/torchium-config.cmake" "${PROJECT_BINARY_DIR}/torchium-config-version.cmake"
        DESTINATION "${package_folder}")

# A shared library has its dependencies; a static one needs them listed: pkg-config --static.
list(JOIN OpenMP_C_LIB_NAMES " -l" private_libraries)
set(private_libraries "-l${private_libraries} -l${CMAKE_DL_LIBS} -lm")
file(RELATIVE_PATH prefix_from_pc "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
configure_file(cmake/torchium.pc.in torchium.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/torchium.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

if(TORCHIUM_BUILD_CLI)
    install(TARGETS torchium_command RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
    torchium_rpath(torchium_command BUILT "${PROJECT_BINARY_DIR}/bin" INSTALLED "${CMAKE_INSTALL_BINDIR}")
endif()
