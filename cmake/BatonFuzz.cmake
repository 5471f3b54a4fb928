# baton_fuzzer(name SOURCES a_fuzz.cc DEPS libs... [COPIES n])
# One libFuzzer harness (a LLVMFuzzerTestOneInput), with its seeds in tests/fuzz/seeds/<name>/. With
# BATON_FUZZ it is linked against libFuzzer and put in build/<preset>/fuzzers. Without, it is one of those in
# the program fuzz_replays, which runs the seeds and damaged copies of them (names of harnesses may collide
# there). Either way CTest runs it over the seeds, so that every compiler and sanitizer does.
# COPIES: of each seed, as fuzz_replays has it, where an input takes long.
# They have one thread: the thread sanitizer has nothing to say of them.
function(baton_fuzzer name)
  if(BATON_SANITIZE STREQUAL thread)
    return()
  endif()
  cmake_parse_arguments(ARG "" "COPIES" "SOURCES;DEPS" ${ARGN})
  set(seeds ${PROJECT_SOURCE_DIR}/tests/fuzz/seeds/${name})
  if(NOT IS_DIRECTORY ${seeds})
    message(FATAL_ERROR "fuzzer ${name} has no seeds: put at least one valid input in ${seeds}")
  endif()
  if(BATON_FUZZ)
    add_executable(${name} ${ARG_SOURCES})
    target_link_libraries(${name} PRIVATE ${ARG_DEPS} baton_options GTest::gmock GTest::gtest)
    baton_test_code(${name})  # its precompiled header includes theirs; the libraries are what is watched
    if(NOT TARGET fuzzers)
      add_custom_target(fuzzers)
    endif()
    add_dependencies(fuzzers ${name})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/fuzzers)
    add_test(NAME ${name} COMMAND ${name} -runs=0 -verbosity=0 ${seeds})
  else()
    if(NOT TARGET fuzz_replays)
      add_executable(fuzz_replays ${PROJECT_SOURCE_DIR}/tests/fuzz/replay/main.cc)
      target_link_libraries(fuzz_replays PRIVATE baton_options GTest::gmock GTest::gtest)
      baton_test_code(fuzz_replays)
    endif()
    # The harness under a name of its own.
    set(harness ${CMAKE_CURRENT_SOURCE_DIR}/${ARG_SOURCES})
    set(replay ${CMAKE_CURRENT_BINARY_DIR}/${name}_replay.cc)
    file(CONFIGURE OUTPUT ${replay} CONTENT [[
#define LLVMFuzzerTestOneInput @name@
#include "@harness@"
#undef LLVMFuzzerTestOneInput
#include "tests/fuzz/replay/replay.h"
static const baton::FuzzReplay replay_of_@name@("@name@", @name@);
]] @ONLY)
    target_sources(fuzz_replays PRIVATE ${replay})
    target_link_libraries(fuzz_replays PRIVATE ${ARG_DEPS})
    add_test(NAME ${name} COMMAND fuzz_replays ${name} ${seeds} ${ARG_COPIES})
  endif()
  set_tests_properties(${name} PROPERTIES LABELS unit)
endfunction()
