# Headers that nearly every source reads, compiled once and shared by all targets that are built alike.
# GCC and Clang read a precompiled header only with the flags it was made with, so there is one per kind.

# baton_precompiled(name HEADERS <a> "b.h"... [BASE target] [OPTIONS ...] [DEPS ...])
# A library of nothing but the header; baton_precompile(target name) lets a target use it.
function(baton_precompiled name)
  cmake_parse_arguments(ARG "" "BASE" "HEADERS;OPTIONS;DEPS" ${ARGN})
  if(NOT ARG_BASE)
    set(ARG_BASE baton_options)
  endif()
  set(source ${PROJECT_BINARY_DIR}/precompiled/${name}.cc)
  if(NOT EXISTS ${source})
    file(WRITE ${source} "// Nothing: the header is what counts.\n")
  endif()
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${source})
  target_link_libraries(${name} PRIVATE ${ARG_BASE} ${ARG_DEPS})
  target_compile_options(${name} PRIVATE ${ARG_OPTIONS})
  target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
  if("-fPIE" IN_LIST ARG_OPTIONS)
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  endif()
  # ccache: what the header was made from stands for its bytes, which differ from folder to folder.
  set(kind gch)
  if(CMAKE_CXX_COMPILER_ID MATCHES Clang)
    set(kind pch)
  endif()
  string(SHA256 made_from "${CMAKE_CXX_COMPILER} ${CMAKE_CXX_COMPILER_VERSION} ${CMAKE_CXX_FLAGS}
    ${CMAKE_CXX_FLAGS_RELWITHDEBINFO} ${CMAKE_BUILD_TYPE} ${BATON_SANITIZE} ${BATON_FUZZ} ${absl_VERSION}
    ${CLI11_VERSION} ${nlohmann_json_VERSION} ${GTest_VERSION} ${ARG_HEADERS} ${ARG_OPTIONS}")
  set(sum ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${name}.dir/cmake_pch.hxx.${kind}.sum)
  file(CONFIGURE OUTPUT ${sum} CONTENT "${made_from}\n")
endfunction()

function(baton_precompile target name)
  target_precompile_headers(${target} REUSE_FROM ${name})
endfunction()
