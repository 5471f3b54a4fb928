// The `lm://` wire over real sockets: clients that behave, and strangers.
#include "kvtransfer/store/lm_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "tests/test.h"
#include "tests/until.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer::store {
namespace {

// What LMCache's connector sends: nine numbers and a key with blanks behind it.
std::string request(int32_t command, const std::string& key, int32_t length = 0,
                    std::array<int32_t, 4> dims = {}, int32_t format = 1, int32_t dtype = 2,
                    int32_t location = 0) {
  const int32_t numbers[9] = {command, length,  format,  dtype,  location,
                              dims[0], dims[1], dims[2], dims[3]};
  std::string out(reinterpret_cast<const char*>(numbers), sizeof(numbers));
  std::string padded = key;
  padded.resize(kLmKey, ' ');
  return out + padded;
}

struct Reply {
  int32_t code, length, format, dtype, dims[4], location;
};
static_assert(sizeof(Reply) == kLmReply);

class Client {
 public:
  explicit Client(uint16_t port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  bool connected() const { return connected_; }
  bool send_all(const std::string& bytes) {
    return send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }
  // Fewer where the other side closed.
  std::string receive(size_t bytes) {
    std::string out(bytes, '\0');
    const ssize_t got = recv(fd_.get(), out.data(), bytes, MSG_WAITALL);
    out.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return out;
  }
  Reply reply() {
    Reply out{};
    const std::string bytes = receive(sizeof(out));
    if (bytes.size() == sizeof(out)) std::memcpy(&out, bytes.data(), sizeof(out));
    return out;
  }
  Reply ask(const std::string& bytes) {
    send_all(bytes);
    return reply();
  }
  void put(const std::string& key, const std::string& value) {
    send_all(request(1, key, static_cast<int32_t>(value.size()), {2, 3, 5, 7}, 4, 3, 1) + value);
  }
  void finish_sending() { shutdown(fd_.get(), SHUT_WR); }

 private:
  base::UniqueFd fd_;
  bool connected_ = false;
};

class LmServerTest : public ::testing::Test {
 protected:
  void start(size_t bytes = 4 << 20, size_t connections = 1024) {
    memory_.resize(bytes);
    arena_ = std::make_unique<BlockArena>(memory_, 4096);
    server_ = must(LmServer::start({.connections = connections}, *arena_));
  }
  std::vector<std::byte> memory_;
  std::unique_ptr<BlockArena> arena_;
  std::unique_ptr<LmServer> server_;
};

TEST_F(LmServerTest, WhatWasPutIsGot) {
  start();
  Client client(server_->port());
  std::string value(300000, '\0');
  for (size_t i = 0; i < value.size(); ++i) value[i] = static_cast<char>(i * 31 >> 3);
  EXPECT_EQ(client.ask(request(3, "model@1@0@ab@half")).code, 400);
  EXPECT_EQ(client.ask(request(2, "model@1@0@ab@half")).code, 400);
  client.put("model@1@0@ab@half", value);
  EXPECT_EQ(client.ask(request(3, "model@1@0@ab@half")).code, 200);
  const Reply got = client.ask(request(2, "model@1@0@ab@half"));
  EXPECT_EQ(got.code, 200);
  EXPECT_EQ(got.length, 300000);
  EXPECT_EQ(got.format, 4);
  EXPECT_EQ(got.dtype, 3);
  EXPECT_EQ(got.dims[0], 2);
  EXPECT_EQ(got.dims[3], 7);
  EXPECT_EQ(got.location, 1);
  EXPECT_EQ(client.receive(value.size()), value);
  // Another client sees it; the last that was put counts.
  Client other(server_->port());
  other.put("model@1@0@ab@half", "short");
  EXPECT_EQ(other.ask(request(2, "model@1@0@ab@half")).length, 5);
  EXPECT_EQ(other.receive(5), "short");
  EXPECT_EQ(other.ask(request(2, "model@1@0@ab@hal")).code, 400);
  EXPECT_EQ(other.ask(request(5, "")).code, 200);
  const Reply keys = other.ask(request(4, ""));
  EXPECT_EQ(other.receive(static_cast<size_t>(keys.length)), "model@1@0@ab@half");
}

TEST_F(LmServerTest, ManyRequestsInOneBreathAreAnsweredInOrder) {
  start();
  Client client(server_->port());
  std::string all;
  for (int i = 0; i < 50; ++i) {
    all += request(1, "k" + std::to_string(i), 3) + "abc" + request(3, "k" + std::to_string(i)) +
           request(3, "no");
  }
  client.send_all(all);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(client.reply().code, 200);
    EXPECT_EQ(client.reply().code, 400);
  }
}

TEST_F(LmServerTest, WhatHasNoRoomIsDroppedAndTheConnectionGoesOn) {
  start(64 << 10);
  Client client(server_->port());
  client.put("large", std::string(1 << 20, 'x'));
  EXPECT_EQ(client.ask(request(3, "large")).code, 400);
  for (int i = 0; i < 100; ++i) client.put("k" + std::to_string(i), std::string(4000, 'a'));
  EXPECT_EQ(client.ask(request(3, "k99")).code, 200);
  EXPECT_EQ(client.ask(request(3, "k0")).code, 400);
  EXPECT_GT(arena_->stats().evicted, 50u);
}

TEST_F(LmServerTest, AValueThatIsNotWhatItWasIsNotGivenOut) {
  start();
  Client client(server_->port());
  client.put("k", std::string(5000, 'a'));
  EXPECT_EQ(client.ask(request(3, "k")).code, 200);
  arena_->each_from_the_newest([](const BlockArena::Found& block) {
    block.space->bytes()[kLmKey + 77] ^= std::byte{1};
    return false;
  });
  EXPECT_EQ(client.ask(request(2, "k")).code, 400);
}

TEST_F(LmServerTest, AMalformedRequestEndsTheConnection) {
  start();
  for (const std::string& wrong :
       {request(1, "k", -1), request(1, "k", INT32_MIN), request(0, "k"), request(6, "k"),
        std::string(186, '\xff'), std::string("GET / HTTP/1.1\r\n") + std::string(200, 'a')}) {
    Client client(server_->port());
    client.send_all(wrong);
    EXPECT_EQ(client.receive(1), "");
  }
  // Cut short, in the head and in the value.
  for (size_t bytes : {0, 1, 100, 185, 186, 200}) {
    Client client(server_->port());
    client.send_all((request(1, "cut", 1000) + std::string(1000, 'x')).substr(0, bytes));
    client.finish_sending();
    EXPECT_EQ(client.receive(1), "");
  }
  Client client(server_->port());
  EXPECT_EQ(client.ask(request(3, "cut")).code, 400);
}

// Who has never made a request goes for a newcomer; who has, stays.
TEST_F(LmServerTest, StrangersTakeNoPlaceFromClients) {
  start(4 << 20, 20);
  Client client(server_->port());
  EXPECT_EQ(client.ask(request(5, "")).code, 200);
  std::vector<std::unique_ptr<Client>> strangers;
  for (int i = 0; i < 200; ++i) {
    strangers.push_back(std::make_unique<Client>(server_->port()));
    strangers.back()->send_all(request(1, "k").substr(0, static_cast<size_t>(i) % 186));
  }
  Client another(server_->port());
  EXPECT_EQ(another.ask(request(5, "")).code, 200);
  EXPECT_EQ(client.ask(request(5, "")).code, 200);
}

// Values that never come hold a quarter of the memory, at most.
TEST_F(LmServerTest, ValuesThatNeverComeHoldLittle) {
  start(1 << 20);
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 64; ++i) {
    slow.push_back(std::make_unique<Client>(server_->port()));
    slow.back()->send_all(request(1, "slow" + std::to_string(i), 60000) + "begins");
  }
  Client client(server_->port());
  EXPECT_EQ(client.ask(request(5, "")).code, 200);
  for (int i = 0; i < 20; ++i) client.put("k" + std::to_string(i), std::string(1000, 'a'));
  until([&] { return server_->stats().totals.puts >= 84; },
        [&] { EXPECT_EQ(client.ask(request(5, "")).code, 200); });
  EXPECT_LE(server_->stats().totals.arriving, (1u << 20) / 4);
  EXPECT_LT(arena_->stats().bytes, 700u << 10);
}

// More callers than this process may have descriptors: the rest wait or are turned away, and
// afterwards all is as before.
TEST_F(LmServerTest, MoreCallersThanDescriptors) {
  start(4 << 20, 1 << 20);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit before = limit;
  limit.rlim_cur = 200;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  {
    std::vector<std::unique_ptr<Client>> callers;
    for (int i = 0; i < 400; ++i) {
      callers.push_back(std::make_unique<Client>(server_->port()));
      if (!callers.back()->connected()) callers.pop_back();
    }
    EXPECT_GT(callers.size(), 50u);
  }
  // Until the server has seen that they left, their descriptors may be missing on either side.
  until([&] { return Client(server_->port()).ask(request(5, "")).code == 200; });
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(LmServer, WhatCannotBeListenedOnIsSaidSo) {
  std::vector<std::byte> memory(1 << 16);
  BlockArena arena(memory, 4096);
  auto first = must(LmServer::start({}, arena));
  EXPECT_EQ(LmServer::start({.port = first->port()}, arena).status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(LmServer::start({.host = "10.99.99.99"}, arena).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LmServer::start({.host = "nosuch.invalid"}, arena).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(LmServer::start({.host = "*"}, arena).ok());
}

}  // namespace
}  // namespace baton::kvtransfer::store
