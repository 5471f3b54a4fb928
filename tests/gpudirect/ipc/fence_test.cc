// The fence between two processes: who takes memory back waits for what the other one copies.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"

namespace baton {
namespace {

TEST(CudaIpcFence, MemoryIsTakenBackWhenNoCopyOfAnotherProcessUsesIt) {
  size_t in_the_middle = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    SCOPED_TRACE(seed);
    Pipe down, up;
    const pid_t child = fork();
    if (child == 0) {
      down.close_end(1);
      up.close_end(0);
      {
        InstalledFake fake;
        End end(fake, "shm");
        end.make();
        up.say(end.offer());
        fcntl(down.ends[0], F_SETFL, O_NONBLOCK);
        while (down.hear().empty() && getppid() != 1) end.worker->progress();
        end.give_back();
        up.say("gone");
      }
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    InstalledFake fake({.seed = seed});
    {
      End here(fake, "shm");
      here.make();
      const std::string offered = up.hear();
      const PeerId peer = *here.worker->connect(offered.substr(RemoteRegion::kEncodedBytes));
      const TransferId id = *here.worker->submit(
          {.peer = peer,
           .local = here.region,
           .local_layout = Layout::contiguous(0, kSharedBytes),
           .remote = *RemoteRegion::decode(offered.substr(0, RemoteRegion::kEncodedBytes)),
           .remote_layout = Layout::contiguous(0, kSharedBytes)});
      here.until([&] { return fake.fake().queued() > 0 || ended(*here.worker->state(id)); });
      if (fake.fake().queued() > 0) ++in_the_middle;
      down.say("take it back");
      // It does not, as long as nobody here looks whether the copy has ended. Were it to, it would
      // say so in this time, or later and be missed.
      pollfd answer{.fd = up.ends[0], .events = POLLIN};
      if (fake.fake().queued() > 0) {
        EXPECT_EQ(poll(&answer, 1, 100), 0) << "a copy to memory that is gone is still to come";
      }
      fcntl(up.ends[0], F_SETFL, O_NONBLOCK);
      here.until([&] { return up.hear() == "gone"; });
      EXPECT_EQ(fake.fake().queued(), 0u) << "a copy to memory that is gone is still to come";
      here.until([&] { return ended(*here.worker->state(id)); });
      int how = -1;
      waitpid(child, &how, 0);
      EXPECT_EQ(how, 0);
      here.give_back();
      here.worker.reset();
    }
    fake.expect_clean();
  }
  EXPECT_GT(in_the_middle, 3u);
}

}  // namespace
}  // namespace baton
