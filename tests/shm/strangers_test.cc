// Sockets of strangers: of other users, and of those who dial and then say nothing. None of them
// keeps a peer out, and none holds up a round of progress. And those who dial while this process
// has no descriptor left.
#include <sys/syscall.h>

#include "tests/captured_log.h"
#include "tests/manual_clock.h"
#include "tests/shm/shm_node.h"
#include "tests/test.h"
#include "transport/net/handshake.h"
#include "transport/shm/packet_socket.h"

namespace {
bool pretend_other_user = false;
bool pretend_no_descriptors = false;
size_t accepts_refused = 0;
}  // namespace

// Stands in for the C library's: whoever dials belongs to another user, if the test says so.
extern "C" int getsockopt(int fd, int level, int name, void* value, socklen_t* length) noexcept {
  const long result = syscall(SYS_getsockopt, fd, level, name, value, length);
  if (pretend_other_user && result == 0 && level == SOL_SOCKET && name == SO_PEERCRED) {
    ++static_cast<ucred*>(value)->uid;
  }
  return static_cast<int>(result);
}

extern "C" int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  if (pretend_no_descriptors) {
    ++accepts_refused;
    errno = EMFILE;
    return -1;
  }
  return static_cast<int>(syscall(SYS_accept4, fd, address, size, flags));
}

namespace baton::shm {
namespace {

bool closed(const PacketSocket& socket) {
  pollfd query{.fd = socket.fd(), .events = POLLRDHUP, .revents = 0};
  return ::poll(&query, 1, 0) > 0;
}

struct Strangers {
  // As many as the backlog has room for, at most `count`.
  void dial(const std::string& address, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      auto socket = PacketSocket::dial(address);
      if (!socket.ok()) return;
      sockets.push_back(*std::move(socket));
    }
  }
  size_t turned_away() const {
    return static_cast<size_t>(std::count_if(sockets.begin(), sockets.end(), closed));
  }
  std::vector<PacketSocket> sockets;
};

// connect_nodes() for a server that listens already.
void join(ShmNode& client, ShmNode& server, const std::string& address) {
  client.provider->connect({.session = 1, .address = address, .expected = server.self});
  until({&client, &server}, [&] { return !client.rails.empty() && !server.rails.empty(); });
}

// Promise(security): Strangers on the machine keep no peer out of shared memory | `SO_PEERCRED`;
//   the longest silent caller makes room
TEST(Strangers, OtherUsersTakeNoSlot) {
  ShmNode server("server"), client("client");
  const std::string address = *server.provider->listen();
  pretend_other_user = true;
  Strangers strangers;
  for (int i = 0; i < 3; ++i) {
    strangers.dial(address, 100);
    for (int round = 0; round < 50; ++round) {
      server.provider->arm();  // the next round looks at the sockets
      server.progress();
    }
    EXPECT_EQ(strangers.turned_away(), strangers.sockets.size());
  }
  pretend_other_user = false;
  join(client, server, address);
}

TEST(Strangers, SilentConnectionsMakeRoomForAPeer) {
  ShmNode server("server"), client("client");
  const std::string address = *server.provider->listen();
  Strangers strangers;
  for (int i = 0; i < 3; ++i) {
    strangers.dial(address, 100);
    while (server.progress()) {
    }
  }
  EXPECT_GT(strangers.sockets.size(), 128U);
  join(client, server, address);
  EXPECT_TRUE(closed(strangers.sockets.front())) << "the oldest goes";
  EXPECT_FALSE(closed(strangers.sockets.back()));
}

TEST(Strangers, DoNotEvictAPeerInItsHandshake) {
  ShmNode server("server");
  const std::string address = *server.provider->listen();
  net::Handshake handshake(net::Handshake::Role::kClient, server.key,
                           {.uid = WorkerUid::random(), .name = "raw"});
  auto peer = PacketSocket::dial(address).value();
  ASSERT_EQ(peer.send(handshake.to_send()), PacketSocket::Io::kDone);
  pollfd answer{.fd = peer.fd(), .events = POLLIN, .revents = 0};
  until({&server}, [&] { return ::poll(&answer, 1, 0) > 0; });
  Strangers strangers;
  for (int i = 0; i < 3; ++i) {
    strangers.dial(address, 100);
    while (server.progress()) {
    }
  }
  EXPECT_TRUE(closed(strangers.sockets.front()));
  EXPECT_FALSE(closed(peer));
}

TEST(Strangers, AreLetInAFewAtATime) {
  ShmNode server("server");
  const std::string address = *server.provider->listen();
  pretend_other_user = true;
  Strangers strangers;
  strangers.dial(address, 100);
  ASSERT_GT(strangers.sockets.size(), 50U);
  size_t most = 0;
  until([&] { return strangers.turned_away() == strangers.sockets.size(); },
        [&] {
          const size_t before = strangers.turned_away();
          server.provider->arm();
          server.progress();
          most = std::max(most, strangers.turned_away() - before);
        });
  pretend_other_user = false;
  EXPECT_LE(most, 16U);
}

bool readable(int fd) {
  pollfd query{.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&query, 1, 0) > 0;
}

// A listener that is readable and cannot be accepted from would keep an idle worker awake for ever.
TEST(NoDescriptors, TheAcceptorDoesNotSpinAndThePeerConnectsLater) {
  CapturedLog log(base::LogLevel::kWarning);
  ManualClock clock;
  ShmNode server("server", {}, "0123456789abcdef", clock), client("client");
  const std::string address = *server.provider->listen();
  pretend_no_descriptors = true;
  client.provider->connect({.session = 1, .address = address, .expected = server.self});
  const auto look = [&] {
    server.provider->arm();  // the next round looks at the sockets
    server.progress();
    client.progress();
  };
  for (int round = 0; round < 100; ++round) look();
  EXPECT_EQ(accepts_refused, 1U);
  EXPECT_FALSE(readable(server.provider->wait_fd()));  // who sleeps on it sleeps
  EXPECT_EQ(server.provider->next_timer(), clock.now() + std::chrono::milliseconds(100));
  for (int pause = 0; pause < 20; ++pause) {
    clock.advance(std::chrono::milliseconds(100));
    look();
  }
  EXPECT_EQ(accepts_refused, 21U);
  ASSERT_EQ(log.lines.size(), 1U);  // and not one for each time
  EXPECT_NE(log.lines[0].find("ulimit -n"), std::string::npos) << log.lines[0];

  pretend_no_descriptors = false;
  clock.advance(std::chrono::milliseconds(100));
  until({&client, &server}, [&] { return !client.rails.empty() && !server.rails.empty(); });
  ASSERT_EQ(log.lines.size(), 2U);  // a recovery is told as the loss was
  // The next time is worth a line of its own.
  pretend_no_descriptors = true;
  ShmNode late("late");
  late.provider->connect({.session = 2, .address = address, .expected = server.self});
  for (int round = 0; round < 100; ++round) {
    late.progress();
    look();
  }
  pretend_no_descriptors = false;
  EXPECT_EQ(log.lines.size(), 3U);
}

}  // namespace
}  // namespace baton::shm
