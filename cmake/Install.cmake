# Install tree: bin/zorro, lib/libzorro.so, include/zorro, lib/cmake/zorro. The consumer brings torch.
include(CMakePackageConfigHelpers)
if(SKBUILD AND NOT SKBUILD_STATE STREQUAL "editable")
  # In a wheel the library and the command lie in the package, and torch is a sibling of the package's root.
  set_target_properties(zorro zorro_command PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../../../torch/lib")
else()
  set_target_properties(zorro PROPERTIES INSTALL_RPATH "$ORIGIN;${torch_root}/lib")
  set_target_properties(zorro_command PROPERTIES
    INSTALL_RPATH "$ORIGIN;$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${torch_root}/lib")
endif()
set(package arctic_platform/rl/zorro_train)
install(TARGETS zorro LIBRARY DESTINATION ${package} COMPONENT python EXCLUDE_FROM_ALL)
install(TARGETS zorro_command RUNTIME DESTINATION ${package} COMPONENT python EXCLUDE_FROM_ALL)
set_target_properties(zorro_torch PROPERTIES EXPORT_NAME torch)
install(TARGETS zorro zorro_torch EXPORT zorroTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(TARGETS zorro_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/zorro DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT zorroTargets NAMESPACE zorro:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/zorro)
configure_package_config_file(cmake/zorroConfig.cmake.in zorroConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/zorro)
write_basic_package_version_file(zorroConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/zorroConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/zorroConfigVersion.cmake"
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/zorro)
