// A program that loads the library, uses it, unloads it, and does so again: nothing of it runs
// afterwards, also where a thread that has called it ends later.
#include <baton/baton.h>
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(what)                                         \
  do {                                                      \
    if (!(what)) {                                          \
      fprintf(stderr, "%d: not so: %s\n", __LINE__, #what); \
      exit(1);                                              \
    }                                                       \
  } while (0)

static void* library;
static sem_t called, unloaded;

static void* call(const char* name) {
  void* found = dlsym(library, name);
  CHECK(found != NULL);
  return found;
}

static int threads(void) {
  int count = 0;
  DIR* folder = opendir("/proc/self/task");
  while (readdir(folder) != NULL) ++count;
  closedir(folder);
  return count;
}

static void* use(void* unused) {
  char here[4096] = "here", there[4096] = "";
  baton_error error = BATON_ERROR_INIT;
  baton_agent *a = NULL, *b = NULL;
  __typeof__(&baton_agent_open) open = call("baton_agent_open");
  CHECK(open("a", &a, &error) == BATON_OK && open("b", &b, &error) == BATON_OK);
  __typeof__(&baton_agent_register) keep = call("baton_agent_register");
  const baton_descriptor mine = {(uint64_t)(uintptr_t)here, sizeof here, 0};
  const baton_descriptor theirs = {(uint64_t)(uintptr_t)there, sizeof there, 0};
  CHECK(keep(a, BATON_DRAM, &mine, 1, &error) == BATON_OK);
  CHECK(keep(b, BATON_DRAM, &theirs, 1, &error) == BATON_OK);
  __typeof__(&baton_agent_metadata) metadata = call("baton_agent_metadata");
  __typeof__(&baton_agent_add_remote) meet = call("baton_agent_add_remote");
  baton_bytes bytes = {NULL, 0};
  CHECK(metadata(b, &bytes, &error) == BATON_OK);
  CHECK(meet(a, bytes.data, bytes.size, NULL, &error) == BATON_OK);
  __typeof__(&baton_bytes_free) give_back = call("baton_bytes_free");
  give_back(&bytes);
  __typeof__(&baton_transfer_make_direct) make = call("baton_transfer_make_direct");
  __typeof__(&baton_transfer_run) run = call("baton_transfer_run");
  baton_transfer transfer = 0;
  CHECK(make(a, BATON_WRITE, BATON_DRAM, &mine, 1, &theirs, 1, "b", NULL, 0, &transfer, &error) ==
        BATON_OK);
  CHECK(run(a, transfer, BATON_FOREVER, &error) == BATON_OK);
  CHECK(strcmp(there, "here") == 0);
  __typeof__(&baton_agent_destroy) destroy = call("baton_agent_destroy");
  destroy(a);
  destroy(b);
  sem_post(&called);
  sem_wait(&unloaded);
  return unused;
}

int main(int argc, char** argv) {
  CHECK(argc == 2);
  sem_init(&called, 0, 0);
  sem_init(&unloaded, 0, 0);
  const int before = threads();
  for (int i = 0; i < 5; ++i) {
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) fprintf(stderr, "%s\n", dlerror());
    CHECK(library != NULL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, use, NULL) == 0);
    sem_wait(&called);
    while (threads() > before + 1) sched_yield();  // who was joined is listed for a moment longer
    CHECK(dlclose(library) == 0);
    sem_post(&unloaded);
    CHECK(pthread_join(thread, NULL) == 0);
  }
  return 0;
}
