# The kernels' image, by nvcc where it is. BATON_NVCC may name it; OFF builds without kernels.
find_program(BATON_NVCC nvcc PATHS /usr/local/cuda/bin)
mark_as_advanced(BATON_NVCC)

# baton_kernel_image(target source.cc OUTPUT image SOURCES kernels.cu headers...)
# Compiles the first of SOURCES for both architectures, whenever one of them changes, and gives
# source.cc of the target the image's path as BATON_KERNEL_IMAGE.
function(baton_kernel_image target source)
  cmake_parse_arguments(ARG "" "OUTPUT" "SOURCES" ${ARGN})
  if(NOT BATON_NVCC)
    message(STATUS "gpudirect: no nvcc, so this build has no kernels")
    return()
  endif()
  list(TRANSFORM ARG_SOURCES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  list(GET ARG_SOURCES 0 entry)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/${ARG_OUTPUT})
  # A quarter of the size, where nvcc can (12.8): it is in every program, and travels (./run gpu --pack).
  execute_process(COMMAND ${BATON_NVCC} --help OUTPUT_VARIABLE can)
  set(compress)
  if(can MATCHES "compress-mode")
    set(compress -compress-mode=size)
  endif()
  # No multiply-add is fused unless it is written so: the host's reference is bit-equal.
  # It takes a minute, and is the same in every build of this tree: the next one takes this one's.
  add_custom_command(OUTPUT ${image}
    COMMAND ${PROJECT_SOURCE_DIR}/cmake/compile_once ${PROJECT_SOURCE_DIR}/build/images ${image} ${ARG_SOURCES} --
            ${BATON_NVCC} -std=c++20 -O3 -fmad=false -fatbin ${compress} -I${PROJECT_SOURCE_DIR}
            -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a
            -gencode=arch=compute_90,code=compute_90 -Werror all-warnings ${entry}
    DEPENDS ${ARG_SOURCES} ${PROJECT_SOURCE_DIR}/cmake/compile_once VERBATIM COMMENT "Compiling the kernels for GPUs")
  add_custom_target(${target}_kernels DEPENDS ${image})
  add_dependencies(${target} ${target}_kernels)
  set_source_files_properties(${source} PROPERTIES OBJECT_DEPENDS ${image}
    COMPILE_DEFINITIONS BATON_KERNEL_IMAGE="${image}")
endfunction()
