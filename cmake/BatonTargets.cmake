# One compile policy for every target, and the helpers the folders use.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# Warnings are errors; `cmake --compile-no-warning-as-error` lets a newer compiler have its opinion.
set(CMAKE_COMPILE_WARNING_AS_ERROR ON)

# What many sources of a target include is read once, and what they instantiate is compiled once: that
# takes a third off the time from nothing, and makes a change of one file cost more.
option(BATON_UNITY "Compile the sources of a target eight at a time" OFF)
set(CMAKE_UNITY_BUILD ${BATON_UNITY})

# GNU ld takes three times as long, and more where a sanitizer's symbols are.
include(CheckLinkerFlag)
option(BATON_MOLD "Link with mold, where it is installed" ON)
if(BATON_MOLD)
  check_linker_flag(CXX -fuse-ld=mold BATON_LINKS_WITH_MOLD)
  if(BATON_LINKS_WITH_MOLD)
    add_link_options(-fuse-ld=mold)
  endif()
endif()

# __FILE__ and debug information name sources relative to the tree: ccache then finds what another checkout compiled.
add_compile_options("-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # Without it GCC collects its garbage four times in a source with many templates, a sixth of the time of a
  # test's source; with it never, for 80 MB more.
  add_compile_options("SHELL:--param ggc-min-heapsize=1048576")
endif()

add_library(baton_options INTERFACE)
target_compile_options(baton_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor
                                               -Wno-missing-field-initializers -fno-math-errno)
target_include_directories(baton_options INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
if(BATON_SANITIZE)
  target_compile_options(baton_options INTERFACE -fsanitize=${BATON_SANITIZE} -fno-omit-frame-pointer
                                                 -fno-sanitize-recover=all)
  target_compile_definitions(baton_options INTERFACE _GLIBCXX_ASSERTIONS)
  target_link_options(baton_options INTERFACE -fsanitize=${BATON_SANITIZE})
endif()
if(BATON_SANITIZE STREQUAL thread AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # It warns of every atomic_thread_fence(). Ours order atomics against each other, never plain data.
  target_compile_options(baton_options INTERFACE -Wno-tsan)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # GCC 12 sees copies out of bounds in std::string's own functions once its header is precompiled.
  target_compile_options(baton_options INTERFACE -Wno-array-bounds -Wno-stringop-overflow
                                                 -Wno-stringop-overread -Wno-restrict)
endif()
if(BATON_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # A source's own class with a member from its unnamed namespace: GCC takes the source for a header.
  target_compile_options(baton_options INTERFACE -Wno-subobject-linkage)
endif()
# What the fuzzers watch: the libraries, not the programs that test them.
add_library(baton_library_options INTERFACE)
target_link_libraries(baton_library_options INTERFACE baton_options)
if(BATON_FUZZ)
  target_compile_options(baton_library_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# What is counted, gcov's way; the rest is as in the release, and comes out of its cache.
if(BATON_COVERAGE)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL GNU OR NOT IS_DIRECTORY ${PROJECT_SOURCE_DIR}/${BATON_COVERAGE})
    message(FATAL_ERROR "BATON_COVERAGE is a folder of this tree, and needs GCC: '${BATON_COVERAGE}'")
  endif()
  add_link_options(--coverage)
endif()
function(baton_counted out)
  set(${out} OFF PARENT_SCOPE)
  if(BATON_COVERAGE)
    set(folder ${PROJECT_SOURCE_DIR}/${BATON_COVERAGE})
    cmake_path(IS_PREFIX folder ${CMAKE_CURRENT_SOURCE_DIR} inside)
    set(${out} ${inside} PARENT_SCOPE)
  endif()
endfunction()

include(BatonPrecompiled)
set(BATON_LIBRARY_HEADERS
  BASE baton_library_options
  HEADERS <algorithm> <array> <atomic> <chrono> <cstdint> <cstring> <functional> <memory> <mutex> <string>
          <string_view> <utility> <vector> <absl/container/flat_hash_map.h> <absl/status/statusor.h>
          <absl/strings/str_cat.h> <absl/strings/str_format.h> <absl/types/span.h>
  DEPS absl::statusor absl::strings absl::str_format absl::flat_hash_map absl::span)
baton_precompiled(baton_precompiled ${BATON_LIBRARY_HEADERS})
if(BATON_SANITIZE)
  baton_precompiled(baton_precompiled_waits ${BATON_LIBRARY_HEADERS} OPTIONS -O0)
endif()

# baton_library(name [WAITS] SOURCES a.cc b.cc DEPS other_targets...)
# WAITS, most of the time, for clients, files or what it measures: how quick its own code is matters little.
# Sanitizers' builds do not optimise it, which takes half the time off its compilation.
function(baton_library name)
  cmake_parse_arguments(ARG "WAITS" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  baton_counted(counted)
  if(counted)
    target_compile_options(${name} PRIVATE --coverage -O0)  # and so not with the precompiled header
  elseif(ARG_WAITS AND BATON_SANITIZE)
    target_compile_options(${name} PRIVATE -O0)
    baton_precompile(${name} baton_precompiled_waits)
  else()
    baton_precompile(${name} baton_precompiled)
  endif()
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                            $<INSTALL_INTERFACE:include/baton>)
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE $<BUILD_INTERFACE:baton_library_options>)
endfunction()

# baton_provider(tcp SOURCES a.cc DEPS other_targets...)
# The library baton_tcp of a provider that registers itself. Nothing calls into it, so the linker
# would leave it out: its registration has a name, and whoever links the library requires that name:
#   extern "C" const baton::ProviderRegistration baton_provider_tcp("tcp", make_tcp_provider);
function(baton_provider name)
  baton_library(baton_${name} ${ARGN})
  target_link_options(baton_${name} INTERFACE LINKER:--require-defined=baton_provider_${name})
endfunction()

# Code of tests is not optimised, which takes half the time off its compilation, and more with the address
# sanitizer, whose checks the optimiser works on longest; what it tests is. A test that computes much itself,
# or measures, is OPTIMISED. Under the thread sanitizer every access of such code is a call: a little, there.
# Its line numbers, a seventh of the rest, are for debuggers and sanitizers: other presets have them.
set(BATON_TEST_OPTIMISATION -O0)
if(BATON_SANITIZE MATCHES thread)
  set(BATON_TEST_OPTIMISATION -O1)
endif()
set(BATON_TEST_DEBUG)
if(NOT BATON_SANITIZE AND CMAKE_BUILD_TYPE STREQUAL RelWithDebInfo)
  set(BATON_TEST_DEBUG -g0)
endif()
# Nor does the undefined-behaviour sanitizer look at each of its pointers, a third of the time: where they lead the
# address sanitizer sees, and in what is tested both look. Its arithmetic, shifts, casts and bounds are looked at.
set(BATON_TEST_CHECKS)
if(BATON_SANITIZE MATCHES undefined)
  set(BATON_TEST_CHECKS
    -fno-sanitize=null,alignment,vptr,object-size,pointer-overflow,nonnull-attribute,returns-nonnull-attribute)
endif()
function(baton_test_code target)
  if("OPTIMISED" IN_LIST ARGN AND BATON_TEST_OPTIMISATION STREQUAL "-O0")
    target_compile_options(${target} PRIVATE -O1 ${BATON_TEST_DEBUG} ${BATON_TEST_CHECKS})  # and so not with the precompiled header
    return()
  endif()
  if(NOT TARGET baton_precompiled_tests)  # most of tests/test.h: ccache would not notice a change of a header of ours
    baton_precompiled(baton_precompiled_tests
      HEADERS <algorithm> <array> <chrono> <condition_variable> <filesystem> <fstream> <functional> <memory>
              <random> <string> <thread> <vector> <gmock/gmock.h> <gtest/gtest.h>
              <absl/container/flat_hash_map.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
              <absl/strings/str_format.h> <absl/types/span.h>
      OPTIONS ${BATON_TEST_OPTIMISATION} ${BATON_TEST_DEBUG} ${BATON_TEST_CHECKS} -fPIE
      DEPS absl::statusor absl::strings absl::str_format absl::flat_hash_map absl::span GTest::gmock
           GTest::gtest)
  endif()
  target_compile_options(${target} PRIVATE ${BATON_TEST_OPTIMISATION} ${BATON_TEST_DEBUG} ${BATON_TEST_CHECKS})
  baton_precompile(${target} baton_precompiled_tests)
endfunction()

# What the thread sanitizer builds: see tests/threads.cmake.
add_custom_target(tests_with_threads)

# baton_add_test(name COMMAND...)
# A test of BATON_REALTIME_TESTS depends on how fast the machine is. It has the label `realtime`, is run once more
# when it fails, and its output says so.
function(baton_add_test name)
  set(twice)
  if(name IN_LIST BATON_REALTIME_TESTS)
    set(twice ${PROJECT_SOURCE_DIR}/tests/run_twice)
  endif()
  add_test(NAME ${name} COMMAND ${twice} ${ARGN})
endfunction()

# baton_test(name LABELS unit SOURCES a_test.cc DEPS libs... [TIMEOUT seconds] [OPTIMISED] [PROGRAM tests] [SHARDS n])
# One GoogleTest binary, registered with CTest as one test per binary under the given labels; with SHARDS as n tests,
# name_0 and so on, each with every n-th of its cases, so that they run beside each other. With PROGRAM it
# shares its binary with other tests, which saves half of the compilation and most of the linking: sources are
# compiled eight at a time, so names of theirs may collide. Each test still has a process of its own, which
# runs the tests of its sources (tests/main.cc); NAME is then a script that does. Not for a source that
# replaces what others use (operator new), nor with definitions for one test alone.
# The limit ends what hangs; tests/until.h gives up before it, and says what was waited for. It is twice as
# long under a sanitizer. A test of BATON_LONG_TESTS computes for minutes, and has three times as long where
# four tests share two processors. TIMEOUT is for one that needs more, with its reason beside it.
# Default deadlines are long (BATON_PATIENCE); a test of a deadline says how long that is. Calls that fail on
# purpose leave no flight records behind, and what is broken on purpose fills no log. A program whose tests were
# all skipped is reported as skipped: what GoogleTest prints last is then a list of skipped tests behind
# "0 tests" passed; a failed test or a sanitizer's report would come behind that list.
set(BATON_ALL_SKIPPED "\\[  PASSED  \\] 0 tests\\.\n(\\[  SKIPPED \\][^\n]*\n)+$")
# Slabs of pools are small here: they are touched when they are made, and at 16 and 64 MiB that was two fifths of the
# slowest tests' time.
set(BATON_TEST_ENVIRONMENT BATON_FLIGHT_RECORDER=none BATON_LOG=error BATON_PATIENCE=20 BATON_SLAB_KIB=2048)
function(baton_test name)
  cmake_parse_arguments(ARG "OPTIMISED" "TIMEOUT;PROGRAM;SHARDS" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT AND name IN_LIST BATON_LONG_TESTS)
    set(ARG_TIMEOUT 900)
  elseif(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  if(BATON_SANITIZE)
    math(EXPR ARG_TIMEOUT "2 * ${ARG_TIMEOUT}")
  endif()
  if(ARG_PROGRAM AND ARG_OPTIMISED)
    message(FATAL_ERROR "${name}: what is OPTIMISED has a program of its own")
  elseif(ARG_PROGRAM)
    baton_shared_program(${name} ${ARG_PROGRAM} "${ARG_SOURCES}" "${ARG_DEPS}")
  else()
    add_executable(${name} ${ARG_SOURCES})
    target_link_libraries(${name} PRIVATE ${ARG_DEPS} baton_options GTest::gmock GTest::gtest_main)
    if(ARG_OPTIMISED)
      baton_test_code(${name} OPTIMISED)
    else()
      baton_test_code(${name})
    endif()
    if(NOT ARG_SHARDS)
      baton_add_test(${name} $<TARGET_FILE:${name}>)
    endif()
  endif()
  set(tests ${name})
  if(ARG_SHARDS)
    set(tests)
    math(EXPR last "${ARG_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${name}_${shard} COMMAND ${name})
      set_tests_properties(${name}_${shard} PROPERTIES LABELS shard
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard}")
      list(APPEND tests ${name}_${shard})
    endforeach()
  endif()
  foreach(test IN LISTS tests)
    set_property(TEST ${test} APPEND PROPERTY LABELS ${ARG_LABELS})
    set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT ${BATON_TEST_ENVIRONMENT})
    set_tests_properties(${test} PROPERTIES TIMEOUT ${ARG_TIMEOUT} SKIP_REGULAR_EXPRESSION "${BATON_ALL_SKIPPED}")
    if(name IN_LIST BATON_LONG_TESTS)
      set_tests_properties(${test} PROPERTIES COST 100)
    endif()
    if(name IN_LIST BATON_FIRST_TESTS)
      set_property(TEST ${test} APPEND PROPERTY LABELS first)
    endif()
    if(name IN_LIST BATON_REALTIME_TESTS)
      set_property(TEST ${test} APPEND PROPERTY LABELS realtime)
    endif()
    # The thread sanitizer has nothing to say of a program with one thread: it builds and runs these.
    if(name IN_LIST BATON_TESTS_WITH_THREADS)
      set_property(TEST ${test} APPEND PROPERTY LABELS threads)
    endif()
  endforeach()
  if(name IN_LIST BATON_TESTS_WITH_THREADS)
    add_dependencies(tests_with_threads ${name})
  endif()
  if(ARG_PROGRAM)
    set_target_properties(${ARG_PROGRAM} PROPERTIES EXCLUDE_FROM_ALL OFF)
  endif()
endfunction()

# The test NAME of a program that several share; nothing builds one of which no test is run.
function(baton_shared_program name program sources deps)
  if(NOT TARGET ${program})
    add_executable(${program} EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/tests/main.cc)
    target_link_libraries(${program} PRIVATE baton_options GTest::gmock GTest::gtest)
    baton_test_code(${program})
  endif()
  target_sources(${program} PRIVATE ${sources})
  target_link_libraries(${program} PRIVATE ${deps})
  set(files)
  foreach(source IN LISTS sources)
    cmake_path(GET source FILENAME file)
    list(APPEND files ${file})
  endforeach()
  list(FILTER files INCLUDE REGEX "_test\\.cc$")
  list(JOIN files "," files)
  baton_add_test(${name} $<TARGET_FILE:${program}> --files=${files})
  add_custom_target(${name} DEPENDS ${program})
  file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/${name}
    CONTENT "#!/bin/sh\nexec '$<TARGET_FILE:${program}>' --files=${files} \"$@\"\n"
    FILE_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
endfunction()
