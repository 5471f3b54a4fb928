# `cmake --install` puts the command, the libraries and their headers in place, with a package that
# makes find_package(baton) define baton::baton: everything under transport/, kvtransfer/ and collectives/.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

function(baton_collect_libraries folder result)
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL STATIC_LIBRARY)
      list(APPEND ${result} ${target})
    endif()
  endforeach()
  get_property(children DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(child IN LISTS children)
    baton_collect_libraries(${child} ${result})
  endforeach()
  set(${result} ${${result}} PARENT_SCOPE)
endfunction()

set(libraries)
baton_collect_libraries(${PROJECT_SOURCE_DIR}/transport libraries)
baton_collect_libraries(${PROJECT_SOURCE_DIR}/verbs libraries)
baton_collect_libraries(${PROJECT_SOURCE_DIR}/kvtransfer libraries)
baton_collect_libraries(${PROJECT_SOURCE_DIR}/collectives libraries)

add_library(baton_all INTERFACE)
add_library(baton::baton ALIAS baton_all)
set_target_properties(baton_all PROPERTIES EXPORT_NAME baton)
target_link_libraries(baton_all INTERFACE ${libraries})

install(TARGETS baton_all ${libraries} EXPORT baton_targets)
install(DIRECTORY transport verbs kvtransfer collectives DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/baton
        FILES_MATCHING PATTERN "*.h")
if(TARGET baton)
  install(TARGETS baton)
endif()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/baton)
install(EXPORT baton_targets NAMESPACE baton:: FILE baton-targets.cmake DESTINATION ${package_dir})
configure_package_config_file(cmake/baton-config.cmake.in baton-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(baton-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/baton-config.cmake
              ${PROJECT_BINARY_DIR}/baton-config-version.cmake DESTINATION ${package_dir})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
