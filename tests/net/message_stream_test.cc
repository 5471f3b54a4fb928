// Messages over a connection: whole ones only, within limits, and how the end is told.
#include "transport/net/message_stream.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <vector>

#include "transport/base/wire.h"
#include "transport/net/endpoint.h"

namespace baton::net {
namespace {

std::string framed(std::string_view message) {
  std::string out;
  put_number(out, static_cast<uint32_t>(message.size()));
  return out.append(message);
}

// A stream, and the bare socket at its other end.
class Stream : public testing::Test {
 protected:
  void SetUp() override {
    const auto listener = listen_on("127.0.0.1", 0, {});
    ASSERT_TRUE(listener.ok());
    fd_ = *start_connect(local_of(*listener), {});
    pollfd called{*listener, POLLIN, 0};
    ASSERT_EQ(1, ::poll(&called, 1, 60'000));
    other_ = ::accept4(*listener, nullptr, nullptr, SOCK_CLOEXEC);
    ::close(*listener);
    poller_ = *Poller::create();
    stream_ = std::make_unique<MessageStream>(
        fd_, *poller_, MessageStream::Options{.max_message = 100, .max_waiting = 64 << 10});
  }
  void TearDown() override { hang_up(); }
  void put(std::string_view bytes) {
    ASSERT_EQ(::send(other_, bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  void hang_up() {
    if (other_ >= 0) ::close(other_);
    other_ = -1;
  }
  // All messages that are here, sleeping until there is one or the end.
  std::vector<std::string> hear() {
    std::vector<std::string> heard;
    for (int i = 0; i < 100 && heard.empty() && stream_->open(); ++i) {
      poller_->poll();
      while (const auto message = stream_->next()) heard.emplace_back(*message);
      if (!heard.empty() || !stream_->open()) break;
      pollfd events{poller_->fd(), POLLIN, 0};
      ::poll(&events, 1, 1000);
    }
    return heard;
  }

  std::unique_ptr<Poller> poller_;
  std::unique_ptr<MessageStream> stream_;
  int fd_ = -1;  // the stream's
  int other_ = -1;
};

using Words = std::vector<std::string>;

TEST_F(Stream, WholeMessagesHoweverTheyCome) {
  put(framed("one") + framed("") + framed("three"));
  EXPECT_EQ(hear(), (Words{"one", "", "three"}));
  const std::string last = framed(std::string(100, 'x'));
  for (const char byte : last.substr(0, last.size() - 1)) {
    put(std::string(1, byte));
    poller_->poll();
    EXPECT_FALSE(stream_->next().has_value());
  }
  put(last.substr(last.size() - 1));
  EXPECT_EQ(hear(), (Words{std::string(100, 'x')}));
  stream_->send("answer");
  char bytes[10];
  ASSERT_EQ(::recv(other_, bytes, sizeof bytes, MSG_WAITALL), 10);
  EXPECT_EQ(std::string(bytes, 10), framed("answer"));
}

TEST_F(Stream, WhatCameBeforeTheEndIsHandedOver) {
  put(framed("last words") + "\1");
  hang_up();
  // Sending to the dead comes first, and must not take the words with it.
  stream_->send("anybody?");
  stream_->send("anybody?");
  EXPECT_EQ(hear(), Words{"last words"});
  hear();
  EXPECT_FALSE(stream_->open());
  EXPECT_TRUE(stream_->gone());
  EXPECT_EQ(stream_->why().message(), "the peer closed the connection");
  stream_->send("nobody");  // is nothing
  EXPECT_FALSE(stream_->next().has_value());
}

TEST_F(Stream, TooLongAMessageEndsIt) {
  put(framed("good") + framed(std::string(101, 'x')) + framed("never heard"));
  EXPECT_EQ(hear(), Words{"good"});
  EXPECT_FALSE(stream_->open());
  EXPECT_TRUE(stream_->gone());
  EXPECT_NE(stream_->why().message().find("101 bytes"), absl::string_view::npos) << stream_->why();
}

TEST_F(Stream, APeerThatDoesNotReadIsLeft) {
  const std::string message(100, 'x');
  size_t sent = 0;
  for (; stream_->open() && sent < (64 << 20); sent += message.size()) stream_->send(message);
  EXPECT_FALSE(stream_->open());
  EXPECT_FALSE(stream_->gone());
  EXPECT_NE(stream_->why().message().find("takes no messages"), absl::string_view::npos);
}

TEST_F(Stream, WhatWaitsGoesOutWhenThePeerReads) {
  // More than the kernel takes: the socket's buffer is made small, and nobody reads.
  const int small = 4096;
  setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
  pollfd room{fd_, POLLOUT, 0};
  size_t sent = 0;
  for (int beyond = 0; beyond < 100 && stream_->open(); sent += 100) {
    stream_->send(std::string(96, 'x'));
    beyond += ::poll(&room, 1, 0) == 0 ? 1 : 0;
  }
  ASSERT_TRUE(stream_->open()) << stream_->why();
  size_t got = 0;
  char bytes[65536];
  for (ssize_t n = 1; got < sent && n > 0; got += static_cast<size_t>(n)) {
    poller_->poll();
    stream_->next();
    n = ::recv(other_, bytes, sizeof bytes, 0);
  }
  EXPECT_EQ(got, sent);
}

}  // namespace
}  // namespace baton::net
