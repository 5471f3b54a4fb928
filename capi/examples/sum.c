// Two ranks, which a launcher would have started, sum their gradients while they compute, in C.
#include <baton/collectives.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kCount = 1 << 16 };
static float gradients[kCount];

static int rank_main(int rank, const char* rendezvous) {
  baton_error error = BATON_ERROR_INIT;
  baton_place place =
      BATON_PLACE_INIT;  // or baton_place_from_environment(), under torchrun, mpirun
  place.rank = rank, place.ranks = 2, place.rendezvous = rendezvous;
  baton_comm* comm;
  if (baton_comm_meet(NULL, &place, NULL, &comm, &error))
    return fprintf(stderr, "%s\n", error.text);
  for (int i = 0; i < kCount; ++i) gradients[i] = (float)(rank + 1);

  baton_call call = BATON_CALL_INIT;
  call.kind = BATON_ALL_REDUCE, call.type = BATON_F32, call.op = BATON_AVG;
  call.in = call.out = gradients, call.count = kCount;
  baton_work work;
  int32_t result = baton_comm_start(comm, &call, &work, &error);
  // ... compute ...
  if (result == BATON_OK) result = baton_work_wait(comm, work, BATON_FOREVER, &error);
  if (result != BATON_OK) fprintf(stderr, "rank %d: %s\n", rank, error.text);
  if (result == BATON_OK && rank == 0) printf("the mean gradient is %g\n", gradients[kCount - 1]);
  baton_comm_destroy(comm);
  return result != BATON_OK;
}

int main(void) {
  baton_error error = BATON_ERROR_INIT;
  baton_rendezvous* server;
  baton_bytes address;
  if (baton_rendezvous_open(NULL, 2, NULL, &server, &address, &error)) return puts(error.text);
  const pid_t other = fork();
  if (other == 0) _exit(rank_main(1, address.data));
  int failed = rank_main(0, address.data), status = 0;
  waitpid(other, &status, 0);
  baton_rendezvous_close(server);
  baton_bytes_free(&address);
  return failed || status != 0;
}
