# Runs PROGRAM under a CTest of its own with the property that baton_test() sets, and reads the verdicts.
file(REMOVE_RECURSE ${WORK_DIR})
file(MAKE_DIRECTORY ${WORK_DIR})

function(expect filter verdict)
  file(WRITE ${WORK_DIR}/CTestTestfile.cmake "
    add_test(it [==[${PROGRAM}]==] [==[--gtest_filter=${filter}]==])
    set_tests_properties(it PROPERTIES SKIP_REGULAR_EXPRESSION [==[${ALL_SKIPPED}]==])\n")
  execute_process(COMMAND ${CMAKE_CTEST_COMMAND} WORKING_DIRECTORY ${WORK_DIR}
                  OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT output MATCHES "it \\.+ *\\**${verdict}")
    message(SEND_ERROR "--gtest_filter=${filter} was not \"${verdict}\":\n${output}")
  endif()
endfunction()

expect("Some.Skips*" "Skipped")
expect("Some.Skips" "Skipped")
expect("Some.Skips*:Some.Passes" " *Passed")
expect("Some.Skips*:Some.Fails" "Failed")
expect("Some.Fails" "Failed")
file(REMOVE_RECURSE ${WORK_DIR})
