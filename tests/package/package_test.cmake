# Installs the build in BUILD_DIR below WORK_DIR, the way a user would, and uses it from there: by
# find_package, by pkg-config, and each public header alone. HEADERS is the list of public headers,
# separated by commas: nothing else may be among the installed ones.
function(run)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE result OUTPUT_VARIABLE output
                  ERROR_VARIABLE output)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed (${result}): ${ARGV}\n${output}")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

file(REMOVE_RECURSE ${WORK_DIR})
set(prefix ${WORK_DIR}/prefix)
# Whoever built `baton` alone has not built all libraries: they are, when it is installed.
file(REMOVE ${BUILD_DIR}/transport/tcp/libbaton_tcp.a)
run(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})
# What cannot be built leaves nothing behind.
file(READ ${BUILD_DIR}/cmake_install.cmake script)
string(REPLACE "--target baton_installed" "--target there_is_none" broken "${script}")
file(WRITE ${WORK_DIR}/broken.cmake "${broken}")
execute_process(COMMAND ${CMAKE_COMMAND} -DCMAKE_INSTALL_PREFIX=${WORK_DIR}/half -P ${WORK_DIR}/broken.cmake
                RESULT_VARIABLE result ERROR_VARIABLE output OUTPUT_QUIET)
if(result EQUAL 0 OR EXISTS ${WORK_DIR}/half OR NOT output MATCHES "nothing is installed")
  message(FATAL_ERROR "a build that fails must leave nothing installed, and say so: ${result}\n${output}")
endif()

# The headers: all of the list, and no other.
file(GLOB_RECURSE installed RELATIVE ${prefix}/include/baton ${prefix}/include/*)
string(REPLACE "," ";" public "${HEADERS}")
list(APPEND public baton.h collectives.h experts.h)
list(SORT installed)
list(SORT public)
if(NOT installed STREQUAL public)
  message(FATAL_ERROR "installed headers are not those of cmake/BatonPublicHeaders.cmake:\n"
                      "  installed: ${installed}\n  listed:    ${public}")
endif()
foreach(header IN LISTS public)
  run(${CXX} -std=c++20 -fsyntax-only -Wall -Werror -I${prefix}/include/baton
      -include ${header} -x c++ /dev/null)
endforeach()

# find_package.
run(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE_DIR} -B ${WORK_DIR}/build
    -DCMAKE_CXX_COMPILER=${CXX} -DCMAKE_PREFIX_PATH=${prefix})
run(${CMAKE_COMMAND} --build ${WORK_DIR}/build)
run(${WORK_DIR}/build/consumer)
set(found "${output}")

# pkg-config.
file(GLOB_RECURSE pc ${prefix}/baton.pc)
get_filename_component(pc_folder "${pc}" DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
run(pkg-config --static --cflags --libs baton)
separate_arguments(flags UNIX_COMMAND "${output}")
run(${CXX} -std=c++20 ${SOURCE_DIR}/consumer.cc -o ${WORK_DIR}/by_pkg_config ${flags})
run(${WORK_DIR}/by_pkg_config)
if(NOT output STREQUAL found)
  message(FATAL_ERROR "by pkg-config: ${output}\nby find_package: ${found}")
endif()

# The C interface, by pkg-config.
run(pkg-config --cflags --libs libbaton)
separate_arguments(flags UNIX_COMMAND "${output}")
get_filename_component(library_folder ${pc_folder} DIRECTORY)
run(${CC} -std=c11 -Wall -Wextra -Wpedantic -Werror ${PULL_IN_C} -o ${WORK_DIR}/pull ${flags}
    -Wl,-rpath,${library_folder})
run(${WORK_DIR}/pull)
file(REMOVE_RECURSE ${WORK_DIR})
