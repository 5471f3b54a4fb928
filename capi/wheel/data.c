// The C library's variables that Debian's archives use as if they were the program's own, which a shared library
// cannot have. The linker (--wrap) gives them these copies instead.
#include <stdio.h>

extern FILE *__real_stderr, *__real_stdout;
extern char* __real_program_invocation_name;

FILE *__wrap_stderr, *__wrap_stdout;
char* __wrap_program_invocation_name;

// Before libstdc++ makes std::cout (90 in newer ones), hence the reserved number.
#pragma GCC diagnostic ignored "-Wprio-ctor-dtor"
__attribute__((constructor(80))) static void copy_them(void) {
  __wrap_stderr = __real_stderr;
  __wrap_stdout = __real_stdout;
  __wrap_program_invocation_name = __real_program_invocation_name;
}
