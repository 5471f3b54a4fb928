// An agent in C, "b", in a process of its own: 256 pages, each full of its number. Prints its
// metadata in hex and the address of the pages, and lives until it is killed. Its argument: the one
// provider that it uses.
#include <baton/baton.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096

static unsigned char memory[256][PAGE];

static void check(int32_t result, const baton_error* error) {
  if (result >= 0) return;
  fprintf(stderr, "%s: %s\n", baton_result_name(result), error->text);
  exit(1);
}

int main(int argc, char** argv) {
  baton_error error = BATON_ERROR_INIT;
  baton_agent_options options;
  baton_agent_options_init(&options, sizeof options);
  options.name = "b";
  options.require = argc > 1 ? argv[1] : NULL;
  baton_agent* agent;
  check(baton_agent_create(&options, &agent, &error), &error);
  for (int page = 0; page < 256; ++page) memset(memory[page], page, PAGE);
  baton_descriptor whole = {(uint64_t)(uintptr_t)memory, sizeof memory, 0};
  check(baton_agent_register(agent, BATON_DRAM, &whole, 1, &error), &error);
  baton_bytes metadata = {NULL, 0};
  check(baton_agent_metadata(agent, &metadata, &error), &error);
  for (size_t i = 0; i < metadata.size; ++i) printf("%02x", (unsigned char)metadata.data[i]);
  printf("\n%llu\n", (unsigned long long)whole.address);
  fflush(stdout);
  for (;;) pause();
}
