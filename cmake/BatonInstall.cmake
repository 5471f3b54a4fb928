# `cmake --install` puts the command, the libraries and the public headers in place, with what makes
# find_package(baton) define baton::baton and `pkg-config --static baton` know the same. Three components,
# which are the Debian packages too: `runtime` is what running needs, `dev` what compiling against it needs,
# `python` the Python package (installed by name alone: `cmake --install ... --component python`).
include(BatonPublicHeaders)
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
baton_collect_libraries(${PROJECT_SOURCE_DIR}/gpudirect libraries)
baton_collect_libraries(${PROJECT_SOURCE_DIR}/kvtransfer libraries)
baton_collect_libraries(${PROJECT_SOURCE_DIR}/collectives libraries)

add_library(baton_all INTERFACE)
add_library(baton::baton ALIAS baton_all)
set_target_properties(baton_all PROPERTIES EXPORT_NAME baton)
target_link_libraries(baton_all INTERFACE ${libraries})

# All that is installed. The tests are not needed for it.
add_custom_target(baton_installed DEPENDS baton baton_capi ${libraries})
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)
# First of all: whoever built `baton` alone installs as well, and a library that cannot be built leaves no half of
# an installation behind.
install(CODE "execute_process(COMMAND \"${CMAKE_COMMAND}\" --build \"${PROJECT_BINARY_DIR}\" --target baton_installed
  RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(failed)
  message(FATAL_ERROR \"nothing is installed, because the build of what is to be installed failed:\\n\${said}\")
endif()" ALL_COMPONENTS)

# --- runtime: the command with its manual, model and services, and the library of the C interface ----
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME runtime)
install(TARGETS baton)
install(TARGETS baton_capi LIBRARY NAMELINK_COMPONENT dev)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY models/kjv-1.8m DESTINATION ${CMAKE_INSTALL_DATADIR}/baton/models)
# The manual pages and the shells' completions, from the commands' own tables of options.
find_package(Python3 COMPONENTS Interpreter QUIET)
if(Python3_Interpreter_FOUND AND NOT CMAKE_CROSSCOMPILING)
  set(manual ${PROJECT_BINARY_DIR}/manual)
  add_custom_command(
    OUTPUT ${manual}/made
    COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/make_manual $<TARGET_FILE:baton> ${manual}/share
    COMMAND ${CMAKE_COMMAND} -E touch ${manual}/made
    DEPENDS baton ${PROJECT_SOURCE_DIR}/scripts/make_manual)
  add_custom_target(baton_manual DEPENDS ${manual}/made)
  add_dependencies(baton_installed baton_manual)
  install(DIRECTORY ${manual}/share/ DESTINATION ${CMAKE_INSTALL_DATADIR})
else()
  message(STATUS "Manual pages and completions: left out, because python3 is missing")
endif()
install(FILES deploy/systemd/baton-serve@.service DESTINATION lib/systemd/system)
install(FILES deploy/systemd/baton.conf DESTINATION lib/sysusers.d)
install(DIRECTORY deploy DESTINATION ${CMAKE_INSTALL_DOCDIR}
        PATTERN systemd EXCLUDE PATTERN debian EXCLUDE PATTERN *.key EXCLUDE)
install(DIRECTORY deploy/systemd/examples DESTINATION ${CMAKE_INSTALL_DOCDIR}/deploy/systemd)

# --- python ---------------------------------------------------------------------------------------
set(python_dir lib/python3/dist-packages)
install(DIRECTORY python/baton DESTINATION ${python_dir} COMPONENT python EXCLUDE_FROM_ALL
        FILES_MATCHING PATTERN *.py PATTERN py.typed PATTERN __pycache__ EXCLUDE)
file(CONFIGURE OUTPUT METADATA CONTENT "Metadata-Version: 2.1\nName: baton\nVersion: @PROJECT_VERSION@\n" @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/METADATA DESTINATION ${python_dir}/baton-${PROJECT_VERSION}.dist-info
        COMPONENT python EXCLUDE_FROM_ALL)

# --- dev ------------------------------------------------------------------------------------------
set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME dev)
install(TARGETS baton_all ${libraries} EXPORT baton_targets)
foreach(header IN LISTS BATON_PUBLIC_HEADERS)
  get_filename_component(folder ${header} DIRECTORY)
  install(FILES ${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/baton/${folder})
endforeach()
install(FILES capi/include/baton/baton.h capi/include/baton/collectives.h
        capi/include/baton/experts.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/baton)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/baton)
install(EXPORT baton_targets NAMESPACE baton:: FILE baton-targets.cmake DESTINATION ${package_dir})
configure_package_config_file(cmake/baton-config.cmake.in baton-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(baton-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/baton-config.cmake
              ${PROJECT_BINARY_DIR}/baton-config-version.cmake DESTINATION ${package_dir})

# --- pkg-config ---------------------------------------------------------------------------------
# Writes `item`, as CMake links it, the way a .pc file names it: into pc_requires, pc_libs or nowhere.
macro(baton_pkg_config_item item)
  if(${item} MATCHES "^absl::(.*)$")
    list(APPEND pc_requires absl_${CMAKE_MATCH_1})
  elseif(${item} STREQUAL OpenSSL::Crypto)
    list(APPEND pc_requires libcrypto)
  elseif(${item} MATCHES "^hwy::hwy$")
    list(APPEND pc_requires libhwy)
  elseif(${item} STREQUAL spdlog::spdlog)
    list(APPEND pc_requires spdlog)
  elseif(${item} STREQUAL ZLIB::ZLIB)
    list(APPEND pc_requires zlib)
  elseif(${item} STREQUAL Threads::Threads)
    list(APPEND pc_libs -pthread)
  elseif(${item} MATCHES "/lib([A-Za-z0-9_]+)\\.(so|a)$")
    list(APPEND pc_libs -l${CMAKE_MATCH_1})
  elseif(${item} MATCHES "^-?l?([a-z]+)$")
    list(APPEND pc_libs -l${CMAKE_MATCH_1})
  elseif(NOT ${item} MATCHES "^(\\$<.*|baton_.*|nlohmann_json::.*|PkgConfig::xxhash)$")
    message(FATAL_ERROR "cmake/BatonInstall.cmake does not know what baton.pc has to say for ${item}")
  endif()
endmacro()

set(pc_requires)
set(pc_libs)
set(pc_archives)
set(pc_defined)  # Nothing calls into a provider: the linker keeps it because this name is required.
foreach(library IN LISTS libraries)
  list(APPEND pc_archives -l${library})
  get_target_property(items ${library} LINK_LIBRARIES)
  foreach(item IN LISTS items)
    baton_pkg_config_item("${item}")
  endforeach()
  get_target_property(options ${library} INTERFACE_LINK_OPTIONS)
  if(options MATCHES "LINKER:(--require-defined=[a-z_]+)")
    list(APPEND pc_defined ${CMAKE_MATCH_1})
  endif()
endforeach()
list(REMOVE_DUPLICATES pc_requires)
list(REMOVE_DUPLICATES pc_libs)
list(JOIN pc_requires " " pc_requires)
list(JOIN pc_libs " " pc_libs)
# One word, so that no tool puts its parts into another order.
string(REPLACE ";" "," pc_archives "-Wl;--start-group;${pc_archives};--end-group;${pc_defined}")
# Found from where the file lies: `cmake --install --prefix` may put it anywhere.
file(RELATIVE_PATH pc_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
configure_file(cmake/baton.pc.in baton.pc @ONLY)
configure_file(cmake/libbaton.pc.in libbaton.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/baton.pc ${PROJECT_BINARY_DIR}/libbaton.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# --- Debian packages, one for each component: `./run package` ---------------------------------------
set(CPACK_GENERATOR DEB)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_ALL runtime dev python)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_PACKAGE_NAME baton)
set(CPACK_PACKAGE_VENDOR Baton)
set(CPACK_PACKAGE_CONTACT "Baton <baton@localhost>")
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_DEBUGINFO_PACKAGE OFF)
set(CPACK_COMPONENT_RUNTIME_DESCRIPTION "The command with its manual, services and model, and the library of the C interface.")
set(CPACK_DEBIAN_RUNTIME_PACKAGE_NAME baton)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SECTION net)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_RUNTIME_PACKAGE_RECOMMENDS python3-jinja2)  # chat templates
set(CPACK_DEBIAN_RUNTIME_PACKAGE_SUGGESTS "libibverbs1, libucx0")  # loaded where they are there
set(CPACK_DEBIAN_RUNTIME_PACKAGE_CONTROL_EXTRA ${PROJECT_SOURCE_DIR}/deploy/debian/postinst)
set(CPACK_COMPONENT_DEV_DESCRIPTION "Headers and static libraries, to compile against.")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME baton-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "baton (= ${PROJECT_VERSION}), libabsl-dev, libhwy-dev, libssl-dev, \
nlohmann-json3-dev, libspdlog-dev, libxxhash-dev, zlib1g-dev")
set(CPACK_COMPONENT_PYTHON_DESCRIPTION "The Python package.")
set(CPACK_DEBIAN_PYTHON_PACKAGE_NAME python3-baton)
set(CPACK_DEBIAN_PYTHON_PACKAGE_SECTION python)
set(CPACK_DEBIAN_PYTHON_PACKAGE_ARCHITECTURE all)
set(CPACK_DEBIAN_PYTHON_PACKAGE_DEPENDS "baton (>= ${PROJECT_VERSION}), python3 (>= 3.9)")
include(CPack)

# --- the reference: `./run docs` ----------------------------------------------------------------
find_program(DOXYGEN doxygen)
if(DOXYGEN)
  set(doxygen_input ${BATON_PUBLIC_HEADERS})
  list(TRANSFORM doxygen_input PREPEND ${PROJECT_SOURCE_DIR}/)
  list(JOIN doxygen_input " " doxygen_input)
  configure_file(docs/Doxyfile.in Doxyfile @ONLY)
  add_custom_target(docs COMMAND ${DOXYGEN} ${PROJECT_BINARY_DIR}/Doxyfile
                    COMMENT "The reference of the public headers: build/<preset>/docs/html/index.html")
endif()
