// Files as an agent's memory: every byte lands where it belongs, whatever the system calls say, and
// after a transfer's end none moves.
#include <sys/syscall.h>
#include <sys/uio.h>

#include <future>

#include "tests/kvtransfer/agent_pair.h"
#include "tests/no_descriptors.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/unique_fd.h"

namespace {

// What happens in place of the next system calls; none: they themselves.
using Call = std::function<ssize_t(int fd, const iovec* pieces, int count, off_t at)>;
std::mutex call_mutex;    // NOLINT
Call instead_of_reading;  // NOLINT
Call instead_of_writing;  // NOLINT

Call call_of(const Call& call) {
  const std::lock_guard lock(call_mutex);
  return call;
}
void replace(Call& call, Call by) {
  const std::lock_guard lock(call_mutex);
  call = std::move(by);
}

ssize_t really_read(int fd, const iovec* pieces, int count, off_t at) {
  return syscall(SYS_preadv, fd, pieces, count, at, 0);
}
ssize_t really_write(int fd, const iovec* pieces, int count, off_t at) {
  return syscall(SYS_pwritev, fd, pieces, count, at, 0);
}

}  // namespace

extern "C" ssize_t preadv(int fd, const iovec* pieces, int count, off_t at) {
  const Call call = call_of(instead_of_reading);
  return call ? call(fd, pieces, count, at) : really_read(fd, pieces, count, at);
}
extern "C" ssize_t pwritev(int fd, const iovec* pieces, int count, off_t at) {
  const Call call = call_of(instead_of_writing);
  return call ? call(fd, pieces, count, at) : really_write(fd, pieces, count, at);
}

namespace baton::kvtransfer {
namespace {

const Time kPatience = until_gives_up();
constexpr size_t kFilePage = 4096;

class AgentFilesTest : public testing::Test {
 protected:
  void SetUp() override { open("file"); }
  void TearDown() override {
    gate_.set_value_once();
    replace(instead_of_reading, nullptr);
    replace(instead_of_writing, nullptr);
  }

  void open(const std::string& name, int flags = O_RDWR | O_CREAT) {
    file_.reset(::open((name[0] == '/' ? name : folder_.path(name)).c_str(), flags, 0600));
    ASSERT_TRUE(file_.valid()) << strerror(errno);
    ASSERT_TRUE(agent_->register_memory({whole_file()}, MemoryKind::kFile).ok());
  }
  uint64_t fd() const { return static_cast<uint64_t>(file_.get()); }
  Descriptor whole_file() const { return {0, memory_.bytes.size(), fd()}; }
  std::vector<Descriptor> file_pages(size_t page, size_t count) const {
    std::vector<Descriptor> out;
    for (size_t i = 0; i < count; ++i) out.push_back({i * page, page, fd()});
    return out;
  }
  // The first `bytes` of memory to or from the beginning of the file.
  absl::StatusOr<AgentTransferId> make(Op op, size_t bytes) {
    return agent_->make_transfer(op, {{memory_.address(), bytes, 0}}, {{0, bytes, fd()}}, "me", {},
                                 MemoryKind::kFile);
  }
  AgentTransferId posted(Op op, size_t bytes) {
    const auto transfer = make(op, bytes);
    EXPECT_TRUE(transfer.ok()) << transfer.status();
    if (!transfer.ok()) return {};
    EXPECT_EQ(agent_->post(*transfer), absl::OkStatus());
    return *transfer;
  }
  absl::Status moved(Op op, size_t bytes) { return agent_->wait(posted(op, bytes), kPatience); }

  // A door that system calls wait at.
  struct Gate {
    void set_value_once() {
      if (!std::exchange(is_open, true)) door.set_value();
    }
    std::promise<void> door;
    std::shared_future<void> opened{door.get_future()};
    std::promise<void> arrival;
    std::shared_future<void> arrived{arrival.get_future()};
    bool is_open = false;
  } gate_;
  // From now on reads wait at the gate; the first says that it is there.
  void hold_reads(const Call& then = really_read) {
    auto first = std::make_shared<std::once_flag>();
    replace(instead_of_reading, [this, then, first](auto... arguments) {
      std::call_once(*first, [this] { gate_.arrival.set_value(); });
      gate_.opened.wait();
      return then(arguments...);
    });
  }
  void await_read() { ASSERT_EQ(gate_.arrived.wait_for(kPatience), std::future_status::ready); }

  TemporaryFolder folder_;
  base::UniqueFd file_;
  std::unique_ptr<Agent> agent_ = make_agent(agent_options("me", "tcp"));
  AgentMemory memory_{*agent_, 40 << 20, 1};
};

// Promise(agents): Between memory and files each byte goes where its descriptor says, once | the
//   agent opens the file itself; jobs of 8 MiB take turns
TEST_F(AgentFilesTest, PagesInAnyOrderThereAndBack) {
  constexpr size_t kPages = 2000;
  std::vector<int64_t> mine(kPages), theirs(kPages);
  std::iota(mine.begin(), mine.end(), 0);
  std::iota(theirs.begin(), theirs.end(), 0);
  const auto here = agent_->prepare_local(memory_.pages(kFilePage, kPages));
  const auto there = agent_->prepare_remote("me", file_pages(kFilePage, kPages), MemoryKind::kFile);
  ASSERT_TRUE(here.ok() && there.ok()) << here.status() << there.status();
  const std::vector<uint8_t> wanted = memory_.bytes;
  std::mt19937 random(7);  // NOLINT: the same each time
  for (int round = 0; round < 3; ++round) {
    std::shuffle(mine.begin(), mine.end(), random);
    std::shuffle(theirs.begin(), theirs.end(), random);
    for (const Op op : {Op::kWrite, Op::kRead}) {
      const auto transfer = must(agent_->make_transfer(op, *here, mine, *there, theirs));
      ASSERT_TRUE(agent_->post(transfer).ok());
      ASSERT_EQ(agent_->wait(transfer, kPatience), absl::OkStatus());
      EXPECT_EQ(agent_->telemetry(transfer)->bytes, kPages * kFilePage);
      EXPECT_TRUE(agent_->release(transfer).ok());
      if (op == Op::kWrite) {
        const size_t stride = memory_.bytes.size() / kPages;
        for (size_t i = 0; i < kPages; ++i) {
          std::vector<uint8_t> page(kFilePage);
          ASSERT_EQ(
              pread(file_.get(), page.data(), kFilePage, theirs[i] * static_cast<off_t>(kFilePage)),
              static_cast<ssize_t>(kFilePage));
          ASSERT_EQ(memcmp(page.data(), &wanted[static_cast<size_t>(mine[i]) * stride], kFilePage),
                    0);
          memset(&memory_.bytes[static_cast<size_t>(mine[i]) * stride], round, kFilePage);
        }
      }
    }
    ASSERT_TRUE(memory_.bytes == wanted);
  }
}

TEST_F(AgentFilesTest, SystemCallsThatDoLessOrAreInterrupted) {
  std::mt19937 random(7);  // NOLINT
  std::mutex mutex;
  const auto some = [&](const Call& really) -> Call {
    return [&, really](int fd, const iovec* pieces, int count, off_t at) {
      size_t limit = 0;
      {
        const std::lock_guard lock(mutex);
        limit = random() % (1 << 20);
      }
      if (limit % 8 == 0) return errno = EINTR, ssize_t{-1};
      iovec first = pieces[0];
      if (limit % 2 == 0 && count > 1) return really(fd, pieces, count - 1, at);
      first.iov_len = std::min(first.iov_len, limit);
      return really(fd, &first, 1, at);
    };
  };
  replace(instead_of_writing, some(really_write));
  replace(instead_of_reading, some(really_read));
  const std::vector<uint8_t> wanted = memory_.bytes;
  const size_t bytes = memory_.bytes.size() - 777;
  ASSERT_TRUE(moved(Op::kWrite, bytes).ok());
  std::fill(memory_.bytes.begin(), memory_.bytes.end() - 777, uint8_t{0});
  ASSERT_TRUE(moved(Op::kRead, bytes).ok());
  EXPECT_TRUE(memory_.bytes == wanted);
}

TEST_F(AgentFilesTest, AShortAFullAndADamagedFileSaySo) {
  ASSERT_EQ(ftruncate(file_.get(), 10 * kFilePage + 100), 0);
  EXPECT_TRUE(moved(Op::kRead, 10 * kFilePage).ok());
  const AgentTransferId read = posted(Op::kRead, 20 * kFilePage);
  const absl::Status end = agent_->wait(read, kPatience);
  EXPECT_TRUE(absl::IsInternal(end)) << end;
  EXPECT_NE(end.message().find("ends at 41060"), std::string::npos) << end;
  EXPECT_EQ(*agent_->state(read), AgentTransferState::kFailed);
  ASSERT_EQ(ftruncate(file_.get(), 20 * kFilePage), 0);
  ASSERT_TRUE(agent_->post(read).ok()) << "it may be posted again";
  EXPECT_TRUE(agent_->wait(read, kPatience).ok());

  open("/dev/full");
  const absl::Status full = moved(Op::kWrite, kFilePage);
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_NE(full.message().find("No space left"), std::string::npos) << full;

  open("file", O_RDONLY | O_CLOEXEC);
  EXPECT_TRUE(absl::IsInternal(moved(Op::kWrite, kFilePage)));
}

TEST_F(AgentFilesTest, PastTheLimitOfAFilesSizeIsAnError) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{2 * kFilePage, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status end = moved(Op::kWrite, 4 * kFilePage);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(end)) << end;
  EXPECT_NE(end.message().find("File too large"), std::string::npos) << end;
}

// pwrite() to one appends, on Linux.
TEST_F(AgentFilesTest, AFileThatIsAppendedToIsReadAndNotWritten) {
  ASSERT_TRUE(moved(Op::kWrite, kFilePage).ok());
  open("file", O_RDWR | O_APPEND | O_CLOEXEC);
  EXPECT_TRUE(moved(Op::kRead, kFilePage).ok());
  const auto write = must(make(Op::kWrite, kFilePage));
  EXPECT_TRUE(absl::IsInvalidArgument(agent_->post(write)));
  EXPECT_EQ(std::filesystem::file_size(folder_.path("file")), kFilePage);
}

TEST_F(AgentFilesTest, BytesGoWhereTheFileIsThoughItsNumberIsAnothers) {
  const auto write = must(make(Op::kWrite, kFilePage));
  const base::UniqueFd other(::open(folder_.path("other").c_str(), O_RDWR | O_CREAT, 0600));
  ASSERT_EQ(dup2(other.get(), file_.get()), file_.get());
  ASSERT_TRUE(agent_->post(write).ok());
  ASSERT_TRUE(agent_->wait(write, kPatience).ok());
  EXPECT_EQ(std::filesystem::file_size(folder_.path("other")), 0u);
  EXPECT_EQ(std::filesystem::file_size(folder_.path("file")), kFilePage);
}

TEST_F(AgentFilesTest, WhatIsNotBetweenMemoryAndAFileOfOnesOwn) {
  const std::vector<Descriptor> here = {{memory_.address(), kFilePage, 0}};
  const std::vector<Descriptor> there = {{0, kFilePage, fd()}};
  const auto direct = [&](const auto& mine, const auto& theirs, const char* who,
                          std::string_view message = {}, MemoryKind kind = MemoryKind::kFile) {
    return agent_->make_transfer(Op::kWrite, mine, theirs, who, message, kind).status();
  };
  EXPECT_TRUE(direct(here, there, "me").ok());
  EXPECT_TRUE(absl::IsUnimplemented(direct(here, there, "me", "hello")));
  EXPECT_TRUE(absl::IsUnimplemented(direct(here, there, "nobody")));
  EXPECT_TRUE(absl::IsUnimplemented(direct(here, there, "me", {}, MemoryKind::kObject)));
  EXPECT_TRUE(absl::IsNotFound(direct(there, here, "me")));
  EXPECT_TRUE(
      absl::IsNotFound(direct(here, std::vector{Descriptor{0, kFilePage, fd() + 1}}, "me")));
  EXPECT_TRUE(absl::IsNotFound(
      direct(here, std::vector{Descriptor{memory_.bytes.size(), kFilePage, fd()}}, "me")));
  EXPECT_TRUE(absl::IsInvalidArgument(direct(here, file_pages(kFilePage, 2), "me")));
  EXPECT_TRUE(absl::IsInvalidArgument(direct(here, file_pages(2 * kFilePage, 1), "me")));
  EXPECT_TRUE(absl::IsUnimplemented(agent_->prepare_local(there, MemoryKind::kFile).status()));

  const auto registered = [&](const Descriptor& range) {
    return agent_->register_memory({{whole_file(), range}}, MemoryKind::kFile);
  };
  const uint64_t before = agent_->stats().registered;
  EXPECT_TRUE(absl::IsInvalidArgument(registered({0, kFilePage, 1000})));
  EXPECT_TRUE(absl::IsInvalidArgument(registered({0, kFilePage, uint64_t{1} << 40})));
  EXPECT_TRUE(absl::IsInvalidArgument(registered({0, 0, fd()})));
  EXPECT_TRUE(absl::IsInvalidArgument(registered({UINT64_MAX, 2, fd()})));
  EXPECT_TRUE(absl::IsInvalidArgument(registered({uint64_t{1} << 62, uint64_t{1} << 63, fd()})));
  EXPECT_EQ(agent_->stats().registered, before) << "all or none";
  EXPECT_TRUE(absl::IsNotFound(agent_->deregister_memory({{0, 1, fd()}}, MemoryKind::kFile)));

  EXPECT_TRUE(agent_->has_remote("me", there, MemoryKind::kFile));
  EXPECT_FALSE(agent_->has_remote("me", {{0, 1, fd() + 1}}, MemoryKind::kFile));
  EXPECT_FALSE(agent_->has_remote("nobody", there, MemoryKind::kFile));
  EXPECT_TRUE(absl::IsUnimplemented(
      agent_->partial_metadata({whole_file()}, true, MemoryKind::kFile).status()));
}

TEST_F(AgentFilesTest, WhatRunsIsFenced) {
  ASSERT_TRUE(moved(Op::kWrite, 16 * kFilePage).ok());
  hold_reads();
  const AgentTransferId read = posted(Op::kRead, 16 * kFilePage);
  await_read();
  EXPECT_EQ(*agent_->state(read), AgentTransferState::kRunning);
  EXPECT_TRUE(absl::IsAlreadyExists(agent_->post(read)));
  EXPECT_TRUE(absl::IsFailedPrecondition(agent_->deregister_memory({memory_.whole()})));
  EXPECT_TRUE(
      absl::IsFailedPrecondition(agent_->deregister_memory({whole_file()}, MemoryKind::kFile)));
  {  // what it does not use may go
    AgentMemory other(*agent_, kFilePage, 2);
    EXPECT_TRUE(agent_->deregister_memory({other.whole()}).ok());
    const base::UniqueFd beside(::open(folder_.path("beside").c_str(), O_RDWR | O_CREAT, 0600));
    const Descriptor range{0, kFilePage, static_cast<uint64_t>(beside.get())};
    ASSERT_TRUE(agent_->register_memory({range}, MemoryKind::kFile).ok());
    EXPECT_TRUE(agent_->deregister_memory({range}, MemoryKind::kFile).ok());
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(agent_->wait(read, Time::zero())));
  const absl::Status slow = agent_->release(read, Time::zero());
  EXPECT_TRUE(absl::IsDeadlineExceeded(slow));
  EXPECT_NE(slow.message().find("file I/O of the transfer is still running"), std::string::npos)
      << slow;
  EXPECT_TRUE(absl::IsFailedPrecondition(agent_->post(read))) << "it is being released";
  EXPECT_EQ(*agent_->state(read), AgentTransferState::kRunning) << "the system call is still there";
  gate_.set_value_once();
  EXPECT_TRUE(agent_->release(read, kPatience).ok());
  EXPECT_TRUE(absl::IsNotFound(agent_->state(read).status()));

  const AgentTransferId again = posted(Op::kRead, kFilePage);
  EXPECT_TRUE(agent_->wait(again, kPatience).ok());
  EXPECT_TRUE(agent_->deregister_memory({whole_file()}, MemoryKind::kFile).ok());
  EXPECT_TRUE(absl::IsNotFound(agent_->post(again)));
  ASSERT_TRUE(agent_->register_memory({whole_file()}, MemoryKind::kFile).ok());
  const auto write = make(Op::kWrite, kFilePage);
  EXPECT_TRUE(agent_->deregister_memory({memory_.whole()}).ok());
  EXPECT_FALSE(agent_->post(*write).ok());
}

// Also where a thread has all that is left of it already.
TEST_F(AgentFilesTest, WhatWasAbortedBeforeItsLastByteIsNotDone) {
  ASSERT_TRUE(moved(Op::kWrite, 16 * kFilePage).ok());
  hold_reads([](int fd, const iovec* pieces, int, off_t at) {
    iovec first = pieces[0];
    first.iov_len = kFilePage;
    return really_read(fd, &first, 1, at);
  });
  const AgentTransferId read = posted(Op::kRead, 16 * kFilePage);
  await_read();
  ASSERT_TRUE(agent_->abort(read).ok());
  gate_.set_value_once();
  EXPECT_TRUE(absl::IsCancelled(agent_->wait(read, kPatience)));
  EXPECT_EQ(*agent_->state(read), AgentTransferState::kCancelled);
  replace(instead_of_reading, nullptr);
  ASSERT_TRUE(agent_->post(read).ok());
  EXPECT_TRUE(agent_->wait(read, kPatience).ok());
}

// Its bytes were all there when the thread heard of it.
TEST_F(AgentFilesTest, WhatWasAbortedBehindItsLastByteIsDone) {
  ASSERT_TRUE(moved(Op::kWrite, 16 * kFilePage).ok());
  hold_reads();
  const AgentTransferId read = posted(Op::kRead, 16 * kFilePage);
  await_read();
  ASSERT_TRUE(agent_->abort(read).ok());
  gate_.set_value_once();
  EXPECT_EQ(agent_->wait(read, kPatience), absl::OkStatus());
  EXPECT_EQ(*agent_->state(read), AgentTransferState::kDone);
  // What does not run is not aborted.
  ASSERT_TRUE(agent_->abort(read).ok());
  EXPECT_EQ(*agent_->state(read), AgentTransferState::kDone);
  const auto idle = must(make(Op::kRead, kFilePage));
  ASSERT_TRUE(agent_->abort(idle).ok());
  EXPECT_EQ(*agent_->state(idle), AgentTransferState::kIdle);
}

// No thread has had it yet: they are all at others.
TEST_F(AgentFilesTest, WhatIsAbortedInTheQueueEndsAtOnce) {
  constexpr int kThreads = 4;
  ASSERT_TRUE(moved(Op::kWrite, kFilePage).ok());
  std::promise<void> all;
  std::atomic<int> there{0};
  replace(instead_of_reading, [&](auto... arguments) {
    if (++there == kThreads) all.set_value();
    gate_.opened.wait();
    return really_read(arguments...);
  });
  std::vector<AgentTransferId> held;
  for (int i = 0; i < kThreads; ++i) held.push_back(posted(Op::kRead, kFilePage));
  ASSERT_EQ(all.get_future().wait_for(kPatience), std::future_status::ready);
  const AgentTransferId queued = posted(Op::kRead, kFilePage);
  const AgentTransferId last = posted(Op::kRead, kFilePage);
  ASSERT_TRUE(agent_->abort(queued).ok());
  EXPECT_EQ(*agent_->state(queued), AgentTransferState::kCancelled);
  EXPECT_TRUE(absl::IsCancelled(agent_->status(queued)));
  gate_.set_value_once();
  for (const AgentTransferId id : held) EXPECT_TRUE(agent_->wait(id, kPatience).ok());
  EXPECT_TRUE(agent_->wait(last, kPatience).ok());
  EXPECT_EQ(*agent_->state(queued), AgentTransferState::kCancelled);
}

TEST_F(AgentFilesTest, WhatSystemCallsSayIsToldAsWhatItIs) {
  int error = 0;
  replace(instead_of_writing, [&](auto...) { return errno = error, ssize_t{-1}; });
  const auto said = [&](int number) {
    error = number;
    return moved(Op::kWrite, kFilePage);
  };
  for (const int full : {ENOSPC, EDQUOT, EFBIG}) {
    EXPECT_TRUE(absl::IsResourceExhausted(said(full))) << strerror(full);
  }
  for (const int other : {EIO, EINVAL}) {
    EXPECT_TRUE(absl::IsInternal(said(other))) << strerror(other);
    EXPECT_EQ(said(other).message().find("O_DIRECT"), std::string::npos);
  }
  file_.reset(::open(folder_.path("file").c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
  if (!file_.valid()) return;  // this file system has none such
  ASSERT_TRUE(agent_->register_memory({whole_file()}, MemoryKind::kFile).ok());
  EXPECT_NE(said(EINVAL).message().find("O_DIRECT"), std::string::npos) << said(EINVAL);
  EXPECT_EQ(said(EIO).message().find("O_DIRECT"), std::string::npos) << said(EIO);
}

TEST_F(AgentFilesTest, ASmallOneDoesNotWaitForALargeOne) {
  constexpr off_t kSmall = 4711;
  std::mutex mutex;
  std::condition_variable changed;
  int large_calls = 0;
  bool small_seen = false;
  // Of the large one's hundred calls a few go, and the others when the small one has had its.
  hold_reads([&](int, const iovec* pieces, int count, off_t at) {
    std::unique_lock lock(mutex);
    if (at == kSmall) small_seen = true;
    changed.notify_all();
    if (at != kSmall && ++large_calls > 20) {
      EXPECT_TRUE(changed.wait_for(lock, kPatience, [&] { return small_seen; }));
    }
    ssize_t bytes = 0;
    for (int i = 0; i < count; ++i) bytes += static_cast<ssize_t>(pieces[i].iov_len);
    return bytes;
  });
  std::vector<Descriptor> here, there;
  for (size_t i = 0; i < 100; ++i) {  // jobs of 8 MiB
    here.push_back({memory_.address(), 8 << 20, 0});
    there.push_back({i << 18, 8 << 20, fd()});
  }
  const auto large =
      must(agent_->make_transfer(Op::kRead, here, there, "me", {}, MemoryKind::kFile));
  ASSERT_TRUE(agent_->post(large).ok());
  await_read();
  const auto small = agent_->make_transfer(Op::kRead, {{memory_.address(), 1, 0}},
                                           {{kSmall, 1, fd()}}, "me", {}, MemoryKind::kFile);
  ASSERT_TRUE(agent_->post(*small).ok());
  gate_.set_value_once();
  EXPECT_TRUE(agent_->wait(*small, kPatience).ok());
  EXPECT_TRUE(agent_->wait(large, kPatience).ok());
}

TEST_F(AgentFilesTest, AnAgentEndsAfterItsFiles) {
  ASSERT_TRUE(moved(Op::kWrite, kFilePage).ok());
  hold_reads();
  const AgentTransferId read = posted(Op::kRead, kFilePage);
  await_read();
  agent_->abandon(read);
  std::atomic<bool> gone{false};
  std::thread end([&] {
    agent_ = nullptr;
    gone = true;
  });
  EXPECT_FALSE(gone);
  gate_.set_value_once();
  end.join();
}

// Of several that sleep, each; and whoever watches the descriptor.
TEST_F(AgentFilesTest, AnEndWakesEverybody) {
  for (const bool thread : {true, false}) {
    auto sleeper = make_agent(agent_options("sleeper", "tcp", thread));
    AgentMemory its(*sleeper, kFilePage, 1);
    ASSERT_TRUE(sleeper->register_memory({whole_file()}, MemoryKind::kFile).ok());
    ASSERT_EQ(ftruncate(file_.get(), kFilePage), 0);
    const auto read = sleeper->make_transfer(Op::kRead, {its.whole()}, {{0, kFilePage, fd()}},
                                             "sleeper", {}, MemoryKind::kFile);
    ASSERT_TRUE(read.ok()) << read.status();
    std::promise<void> door;
    std::shared_future<void> opened = door.get_future();
    replace(instead_of_reading, [opened](auto... arguments) {
      opened.wait();
      return really_read(arguments...);
    });
    uint64_t events = 0;
    ASSERT_EQ(::read(sleeper->event_fd(), &events, sizeof events), 8);
    ASSERT_TRUE(sleeper->post(*read).ok());
    std::vector<std::thread> waiting;
    for (int i = 0; i < 3; ++i) {
      waiting.emplace_back([&] { EXPECT_TRUE(sleeper->wait(*read, kPatience).ok()); });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // most likely they sleep
    door.set_value();
    const Time begin = Clock::steady().now();
    for (std::thread& each : waiting) each.join();
    EXPECT_LT(Clock::steady().now() - begin, kPatience / 2) << "woken by the timeout";
    pollfd ready{.fd = sleeper->event_fd(), .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&ready, 1, static_cast<int>(kPatience / std::chrono::milliseconds(1))), 1);
  }
}

// Which pieces of which files a transfer is made of: neighbours are one, in the order of the files,
// and each goes where it belongs.
class AgentFilePieces : public AgentFilesTest {
 protected:
  base::UniqueFd opened(const std::string& name) {
    base::UniqueFd file(::open(folder_.path(name).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    EXPECT_TRUE(agent_->register_memory({at(file, 0, 16)}, MemoryKind::kFile).ok());
    return file;
  }
  static Descriptor at(const base::UniqueFd& file, size_t piece, size_t count = 1) {
    return {piece * kFilePage, count * kFilePage, static_cast<uint64_t>(file.get())};
  }
  Descriptor here(size_t piece) const { return {memory_.address(piece * kFilePage), kFilePage, 0}; }
  std::string mine(size_t piece) const {
    return {reinterpret_cast<const char*>(&memory_.bytes[piece * kFilePage]), kFilePage};
  }
  static std::string read(const base::UniqueFd& file, size_t piece) {
    std::string out(kFilePage, '\0');
    const ssize_t got =
        pread(file.get(), out.data(), kFilePage, static_cast<off_t>(piece * kFilePage));
    out.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return out;
  }
  // In how many pieces.
  uint64_t run(Op op, const std::vector<Descriptor>& local, const std::vector<Descriptor>& files) {
    const auto made = agent_->make_transfer(op, local, files, "me", {}, MemoryKind::kFile);
    EXPECT_TRUE(made.ok()) << made.status();
    if (!made.ok()) return 0;
    EXPECT_TRUE(agent_->post(*made).ok());
    EXPECT_EQ(agent_->wait(*made, kPatience), absl::OkStatus());
    return agent_->telemetry(*made)->descriptors;
  }
};

TEST_F(AgentFilePieces, NeighboursOnBothSidesAreOne) {
  const base::UniqueFd file = opened("file");
  EXPECT_EQ(run(Op::kWrite, {here(0), here(1), here(2)}, {at(file, 4), at(file, 5), at(file, 6)}),
            1u);
  EXPECT_EQ(run(Op::kWrite, {here(2), here(0), here(1)}, {at(file, 6), at(file, 4), at(file, 5)}),
            1u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(read(file, 4 + i), mine(i));
  EXPECT_EQ(run(Op::kWrite, {here(0), here(2)}, {at(file, 4), at(file, 5)}), 2u) << "memory's gap";
  EXPECT_EQ(read(file, 5), mine(2));
  EXPECT_EQ(run(Op::kWrite, {here(0), here(1)}, {at(file, 8), at(file, 10)}), 2u) << "the file's";
  EXPECT_EQ(read(file, 8), mine(0));
  EXPECT_EQ(read(file, 10), mine(1));
}

// One transfer, whose pieces follow each other but for the file, and lie next to each other here.
TEST_F(AgentFilePieces, EachGoesToItsFile) {
  const base::UniqueFd one = opened("one"), other = opened("other");
  EXPECT_EQ(run(Op::kWrite, {here(3), here(4), here(5), here(6)},
                {at(one, 0), at(other, 1), at(one, 2), at(other, 3)}),
            4u);
  EXPECT_EQ(read(one, 0), mine(3));
  EXPECT_EQ(read(other, 1), mine(4));
  EXPECT_EQ(read(one, 2), mine(5));
  EXPECT_EQ(read(other, 3), mine(6));
  EXPECT_EQ(read(one, 3), "");
  EXPECT_EQ(run(Op::kWrite, {here(8), here(9)}, {at(one, 8), at(other, 9)}), 2u);
  EXPECT_EQ(read(one, 8), mine(8));
  EXPECT_EQ(read(one, 9), "");
  EXPECT_EQ(read(other, 9), mine(9));
  const std::vector<uint8_t> before = memory_.bytes;
  std::fill(memory_.bytes.begin(), memory_.bytes.end(), uint8_t{0});
  EXPECT_EQ(run(Op::kRead, {here(5), here(6)}, {at(one, 2), at(other, 3)}), 2u);
  EXPECT_TRUE(std::equal(before.begin() + 5 * kFilePage, before.begin() + 7 * kFilePage,
                         memory_.bytes.begin() + 5 * kFilePage));
}

TEST_F(AgentFilesTest, FilesGetNoMessageAndAnEmptyMessageIsNotSent) {
  const auto id = make(Op::kWrite, kFilePage);
  const std::string_view words = "words", none = "";
  EXPECT_TRUE(absl::IsUnimplemented(agent_->post(*id, &words)));
  EXPECT_EQ(*agent_->state(*id), AgentTransferState::kIdle);
  EXPECT_TRUE(agent_->post(*id, &none).ok());
  EXPECT_TRUE(agent_->wait(*id, kPatience).ok());
  EXPECT_EQ(*agent_->state(*id), AgentTransferState::kDone);
}

TEST_F(AgentFilePieces, AFileThatCannotBeKeptOpenIsNotRegistered) {
  const base::UniqueFd file(::open(folder_.path("file").c_str(), O_RDWR | O_CREAT, 0600));
  absl::Status full;
  {
    const NoDescriptors none;
    full = agent_->register_memory({at(file, 0)}, MemoryKind::kFile);
  }
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_TRUE(agent_->register_memory({at(file, 0)}, MemoryKind::kFile).ok());
}

}  // namespace
}  // namespace baton::kvtransfer
