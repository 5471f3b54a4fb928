// Peers in other processes and threads: death in the middle, doorbells, and hostile ones.
#include <sys/syscall.h>

#include "tests/shm/shm_node.h"
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/base/wire.h"
#include "transport/net/handshake.h"
#include "transport/shm/packet_socket.h"

namespace {
int failing_sends = 0;  // NOLINT: that many of the next
int failing_with = 0;   // NOLINT
}  // namespace

extern "C" ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  if (failing_sends > 0) return --failing_sends, errno = failing_with, -1;
  return syscall(SYS_sendmsg, fd, message, flags);
}

namespace baton::shm {
namespace {

using std::chrono_literals::operator""ms;
using testing::HasSubstr;

int descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) != -1 ? 1 : 0;
  return count;
}

int mapped_files() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:baton") != std::string::npos ? 1 : 0;
  }
  return count;
}

// A child with a node that shares one region; tells its address and region, then serves until it
// is killed.
class Child {
 public:
  explicit Child(bool with_file, size_t bytes) {
    std::array<int, 2> ends;
    if (pipe(ends.data()) != 0) return;
    pid = base::fork_child();
    if (pid == 0) {
      close(ends[0]);
      ShmNode node("child");
      TestMemory memory(bytes, with_file);
      memory.fill(9);
      std::string hello = node.share(memory).encode();
      base::put_text(hello, *node.provider->listen());
      if (write(ends[1], hello.data(), hello.size()) < 0) _exit(1);
      close(ends[1]);
      while (getppid() != 1) turn({&node}, [] { return false; });
      _exit(0);
    }
    close(ends[1]);
    std::array<char, 256> told;
    size_t got = 0;
    for (ssize_t n; (n = read(ends[0], told.data() + got, told.size() - got)) > 0;) got += n;
    close(ends[0]);
    const std::string_view view(told.data(), got);
    region = *RemoteRegion::decode(view.substr(0, RemoteRegion::kEncodedBytes));
    base::WireReader in(view.substr(RemoteRegion::kEncodedBytes));
    address = std::string(in.text(128));
  }
  ~Child() { kill_and_reap(); }
  void kill_and_reap() {
    if (pid <= 0) return;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = 0;
  }

  pid_t pid = 0;
  RemoteRegion region;
  std::string address;
};

class ShmPeer : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Paths, ShmPeer, testing::Values(true, false),
                         [](const auto& path) { return path.param ? "mapped" : "cma"; });

TEST_P(ShmPeer, DeathEndsEverySliceAndLeavesNothingBehind) {
  ShmNode node("parent");
  TestMemory memory(16 << 20, true);
  const int fds = descriptors();
  const int maps = mapped_files();
  {
    Child child(GetParam(), 16 << 20);
    node.provider->connect({.session = 1, .address = child.address});
    until({&node}, [&] { return !node.rails.empty(); });
    const Layout all = Layout::contiguous(0, 16 << 20);
    // Many transfers of 16 MiB: the child dies in the middle of one of them.
    size_t posted = 0;
    for (; posted < 60; ++posted) {
      ASSERT_TRUE(node.post(
          node.transfer(posted % 2 == 0 ? Op::kWrite : Op::kRead, memory, all, child.region, all)));
    }
    for (int i = 0; i < 20; ++i) node.progress();
    child.kill_and_reap();
    until({&node}, [&] { return !node.down.empty(); });
    EXPECT_EQ(node.done.size(), posted);
    EXPECT_TRUE(absl::IsUnavailable(node.done.back().status)) << node.done.back().status;
    EXPECT_THAT(std::string(node.down[0].message()), HasSubstr("peer child (pid "));
  }
  EXPECT_TRUE(node.rails.empty());
  EXPECT_EQ(descriptors(), fds);
  EXPECT_EQ(mapped_files(), maps);
}

TEST(ShmDoorbell, NoWakeupIsLost) {
  // Each side sleeps on its descriptor, for as long as it takes, until the other has answered.
  constexpr int kRounds = 5000;
  ShmNode a("a");
  ShmNode b("b");
  connect_nodes(a, b);
  const auto play = [](ShmNode& node, int turn) {
    TransferDescriptor& t = node.message("x");
    size_t seen = 0;
    for (int i = 0; i < kRounds; ++i) {
      if (i % 2 == turn) {
        node.post(t);
        until({&node}, [&] { return !node.done.empty(); });
        node.done.clear();
      } else {
        ++seen;
        until({&node}, [&] { return node.notes.size() >= seen; });
      }
    }
  };
  std::thread other([&] { play(b, 1); });
  play(a, 0);
  other.join();
}

// The machine has no memory for it, for once: the next rounds try again, and a sleeper gets up for
// it.
// Promise(sleep): A peer that sleeps over shm is woken although its doorbell had no memory | an
//   owed doorbell is retried by later rounds
TEST(ShmDoorbell, ThatCouldNotBeSentIsSentLater) {
  for (const int error : {ENOBUFS, ENOMEM, EAGAIN}) {
    for (const int times : {1, 3}) {
      ShmNode a("a");
      ShmNode b("b");
      connect_nodes(a, b);
      until([&] { return b.provider->arm(); }, [&] { b.progress(); });
      failing_sends = times;
      failing_with = error;
      a.post(a.message("x"));
      until({&a}, [&] { return !a.done.empty(); });
      ASSERT_EQ(failing_sends, times - 1) << "the doorbell was not what failed";
      pollfd bell{.fd = b.provider->wait_fd(), .events = POLLIN, .revents = 0};
      ASSERT_EQ(poll(&bell, 1, 0), 0);
      for (int left = times - 1; left >= 0; --left) {
        const Time timer = a.provider->next_timer();
        EXPECT_LT(timer, Clock::steady().now() + std::chrono::milliseconds(10));
        a.progress();
      }
      EXPECT_EQ(poll(&bell, 1, 0), 1) << strerror(error) << ": it sleeps on";
      a.progress();
      EXPECT_EQ(a.provider->next_timer(), kNever);
      until({&b}, [&] { return b.notes.size() == 1; });
    }
  }
}

// Speaks the protocol by hand, up to where it stops keeping to it.
class RawPeer {
 public:
  RawPeer(ShmNode& victim, const std::string& address) : victim_(victim) {
    socket_ = *PacketSocket::dial(address);
  }
  void authenticate() {
    net::Handshake handshake(net::Handshake::Role::kClient, victim_.key, {.name = "raw"});
    std::string in;
    until([&] { return handshake.done() && handshake.to_send().empty(); },
          [&] {
            if (!handshake.to_send().empty()) {
              socket_.send(handshake.to_send());
              handshake.sent(handshake.to_send().size());
            }
            victim_.progress();
            Packet packet;
            if (*socket_.receive(packet, true) == PacketSocket::Io::kDone) in.append(packet.view());
            while (!handshake.done() && in.size() >= handshake.wanted()) {
              const size_t want = handshake.wanted();
              ASSERT_TRUE(handshake.receive(in.substr(0, want)).ok());
              in.erase(0, want);
            }
          });
  }
  void send(std::string_view bytes, absl::Span<const int> fds = {}) { socket_.send(bytes, fds); }
  // To the end of the setup; our lane, whose marks are the test's.
  Lane& come_up(const std::string& setup) {
    authenticate();
    const size_t rails = victim_.rails.size();
    for (const size_t bytes :
         {sizeof(ControlSegment), CounterTable::kBytes, sizeof(ConnectionSegment)}) {
      files_.push_back(*create_file("t", bytes));
    }
    send(setup, {files_[0].fd.get(), files_[1].fd.get(), files_[2].fd.get()});
    until({&victim_}, [&] { return victim_.rails.size() > rails; });
    return files_[2].mapping.as<ConnectionSegment>()->from_client;
  }
  // As many descriptors as the kernel takes, which PacketSocket would not send.
  void send_rights(std::string_view bytes, const std::vector<int>& fds) {
    iovec data{const_cast<char*>(bytes.data()), bytes.size()};
    std::vector<cmsghdr> control(CMSG_SPACE(sizeof(int) * fds.size()) / sizeof(cmsghdr) + 1);
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(sizeof(int) * fds.size());
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
    std::memcpy(CMSG_DATA(rights), fds.data(), sizeof(int) * fds.size());
    ASSERT_GE(sendmsg(socket_.fd(), &header, MSG_NOSIGNAL), 0) << strerror(errno);
  }
  // The reason in the goodbye, once the victim has closed.
  std::string goodbye() {
    std::string why = "none";
    Packet packet;
    until({&victim_}, [&] {
      while (true) {
        const auto io = socket_.receive(packet, true);
        if (!io.ok() || *io == PacketSocket::Io::kClosed) return true;
        if (*io == PacketSocket::Io::kLater) return false;
        const auto message = Message::decode(packet.view());
        if (message.ok() && message->kind == Message::Kind::kGoodbye) why = message->text;
      }
    });
    return why;
  }

 private:
  ShmNode& victim_;
  PacketSocket socket_;
  std::vector<OwnFile> files_;
};

class ShmHostile : public testing::Test {
 protected:
  void SetUp() override { raw_.emplace(victim_, *victim_.provider->listen()); }
  void TearDown() override {
    EXPECT_TRUE(victim_.rails.empty());
    // The victim still serves others.
    ShmNode friendly("friendly");
    friendly.provider->connect({.session = 1, .address = *victim_.provider->listen()});
    until({&friendly, &victim_}, [&] { return !friendly.rails.empty(); });
  }

 public:
  static std::string setup_message() {
    Message setup;
    setup.kind = Message::Kind::kSetup;
    setup.control_bytes = sizeof(ControlSegment);
    setup.counter_bytes = CounterTable::kBytes;
    setup.connection_bytes = sizeof(ConnectionSegment);
    return setup.encode();
  }

 protected:
  ShmNode victim_{"victim"};
  std::optional<RawPeer> raw_;
};

TEST_F(ShmHostile, GarbageInsteadOfAHandshakeClosesTheConnection) {
  raw_->send(std::string(kMaxMessage, 'G'));
  EXPECT_NE(raw_->goodbye(), "");
}

TEST_F(ShmHostile, WhatNoPeerSendsIsRefusedByName) {
  const base::UniqueFd unsealed(memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(unsealed.get(), 1 << 20), 0);
  const auto small = create_file("t", 4096).value();
  const struct {
    std::string words;
    std::vector<int> files;
    const char* why;
  } rows[] = {{setup_message(), std::vector<int>(3, unsealed.get()), "F_SEAL_SHRINK"},
              {setup_message(), std::vector<int>(3, small.fd.get()), "4096 bytes"},
              {setup_message(), {}, "0 descriptors"},
              {std::string(kMaxMessage + 1, 'x'), {}, "more than"},
              {"\x7f", {}, "unknown kind"}};
  for (const auto& row : rows) {
    raw_.emplace(victim_, *victim_.provider->listen());
    raw_->authenticate();
    raw_->send(row.words, row.files);
    EXPECT_THAT(raw_->goodbye(), HasSubstr(row.why));
  }
}

// More than any message has: none is kept, of a message that is right but for that, and of others.
TEST_F(ShmHostile, DescriptorsThatNoMessageHasAreGivenBack) {
  auto large = create_file("t", std::max(sizeof(ControlSegment), CounterTable::kBytes)).value();
  Message file;
  file.kind = Message::Kind::kFile;
  file.file = 1;
  Message device = file;
  device.kind = Message::Kind::kDeviceFile;
  for (const std::string& words : {setup_message(), file.encode(), device.encode(),
                                   std::string("\x7f"), std::string(5, 'x')}) {
    for (const size_t count : {1, 2, 4, 5, 64, 253}) {
      SCOPED_TRACE(testing::Message() << int{words[0]} << " with " << count);
      raw_.reset();
      until({&victim_}, [&] { return victim_.rails.empty(); });
      for (int i = 0; i < 3; ++i) victim_.progress();
      const int before = descriptors();
      raw_.emplace(victim_, *victim_.provider->listen());
      raw_->authenticate();
      raw_->send_rights(words, std::vector<int>(count, large.fd.get()));
      EXPECT_NE(raw_->goodbye(), "none");
      raw_.reset();
      for (int i = 0; i < 3; ++i) victim_.progress();
      EXPECT_EQ(descriptors(), before);
    }
  }
}

// As processes that were stopped there: one that is copying, and one that has memory open.
TEST(ShmStopped, PeersAreWaitedForAllAtOnce) {
  ShmNode owner("owner", {{"shm.fence_ms", "50"}});
  const std::string address = *owner.provider->listen();
  TestMemory memory(1 << 20, true), other(1 << 20, true);
  RegionEntry* const region = owner.add(memory);
  RegionEntry* const next = owner.add(other);
  std::deque<RawPeer> peers;
  for (int i = 0; i < 12; ++i) {
    Lane& lane = peers.emplace_back(owner, address).come_up(ShmHostile::setup_message());
    // The numbers of files are given from 1 on.
    i % 2 == 0 ? lane.busy.store(region->index + 1) : lane.opened[7].store(1);
  }
  const Time begin = Clock::steady().now();
  const absl::Status fenced = owner.remove(region);
  EXPECT_TRUE(absl::IsUnavailable(fenced)) << fenced;
  const Time at_once = std::chrono::seconds(6);  // one after the other has a second for each
  EXPECT_LT(Clock::steady().now() - begin, at_once);
  EXPECT_TRUE(owner.rails.empty());
  const Time again = Clock::steady().now();
  EXPECT_EQ(owner.remove(next), absl::OkStatus()) << "nobody has that";
  EXPECT_LT(Clock::steady().now() - again, at_once);
}

}  // namespace
}  // namespace baton::shm
