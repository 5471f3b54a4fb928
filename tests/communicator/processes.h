// Ranks as processes, so that they can die.
#pragma once

#include "tests/communicator/group.h"
#include "tests/test.h"
#include "transport/base/child.h"

namespace baton {

// body() returns what is wrong, or nothing.
using Body = std::function<std::string(Communicator&)>;
inline void run_processes(int ranks, const CommunicatorOptions& options,
                          const std::vector<int>& dying, const Body& body) {
  std::vector<pid_t> children;
  std::vector<int> pipes;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    const pid_t child = base::fork_child();
    ASSERT_GE(child, 0);
    if (child == 0) {
      close(ends[1]);
      char address[64] = "";
      if (read(ends[0], address, sizeof address) <= 0) _exit(3);
      CommunicatorOptions own = options;
      own.rank = rank;
      own.ranks = ranks;
      own.rendezvous = address;
      std::string wrong;
      {
        auto comm = Communicator::create(own);
        wrong = comm.ok() ? body(**comm) : comm.status().ToString();
      }
      if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
      _exit(wrong.empty() ? 0 : 1);
    }
    close(ends[0]);
    pipes.push_back(ends[1]);
    children.push_back(child);
  }
  auto server = must(collectives::RendezvousServer::start(*options.worker.key, "", 0,
                                                          static_cast<uint32_t>(ranks)));
  std::string address = server->address();
  for (int end : pipes) {
    ASSERT_GT(write(end, address.c_str(), address.size() + 1), 0);
    close(end);
  }
  for (int rank = 0; rank < ranks; ++rank) {
    const bool dies = std::find(dying.begin(), dying.end(), rank) != dying.end();
    if (dies) continue;
    int status = 0;
    ASSERT_EQ(waitpid(children[rank], &status, 0), children[rank]);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
  }
  for (int rank : dying) {
    kill(children[rank], SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(children[rank], &status, 0), children[rank]);
    EXPECT_TRUE(WIFSIGNALED(status)) << "rank " << rank << " should not have lived";
  }
}

}  // namespace baton
