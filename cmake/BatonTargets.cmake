# One compile policy for every target, and the helpers the folders use.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

# Warnings are errors; `cmake --compile-no-warning-as-error` lets a newer compiler have its opinion.
set(CMAKE_COMPILE_WARNING_AS_ERROR ON)

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
if(BATON_FUZZ)
  target_compile_options(baton_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# baton_library(name SOURCES a.cc b.cc DEPS other_targets...)
function(baton_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  target_include_directories(${name} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                            $<INSTALL_INTERFACE:include/baton>)
  target_link_libraries(${name} PUBLIC ${ARG_DEPS} PRIVATE $<BUILD_INTERFACE:baton_options>)
endfunction()

# baton_provider(tcp SOURCES a.cc DEPS other_targets...)
# The library baton_tcp of a provider that registers itself. Nothing calls into it, so the linker
# would leave it out: its registration has a name, and whoever links the library requires that name:
#   extern "C" const baton::ProviderRegistration baton_provider_tcp("tcp", make_tcp_provider);
function(baton_provider name)
  baton_library(baton_${name} ${ARGN})
  target_link_options(baton_${name} INTERFACE LINKER:--require-defined=baton_provider_${name})
endfunction()

# baton_test(name LABELS unit SOURCES a_test.cc DEPS libs... [TIMEOUT seconds])
# One GoogleTest binary, registered with CTest as one test per binary under the given labels.
# Sanitizers slow everything down: there the timeout is five times as long. Calls that fail on purpose
# leave no flight records behind.
function(baton_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(BATON_SANITIZE)
    math(EXPR ARG_TIMEOUT "5 * ${ARG_TIMEOUT}")
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} baton_options GTest::gmock GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
                                          ENVIRONMENT BATON_FLIGHT_RECORDER=none)
endfunction()
