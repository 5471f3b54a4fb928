// Messages over a connection: whole ones only, within limits, and how the end is told.
#include "transport/net/message_stream.h"

#include "tests/test.h"
#include "transport/net/endpoint.h"

namespace baton::net {
namespace {

// A stream, and the bare socket at its other end.
class Stream : public testing::Test {
 protected:
  void SetUp() override {
    const auto listener = listen_on("127.0.0.1", 0, {}).value();
    fd_ = *start_connect(local_of(listener), {});
    pollfd called{listener, POLLIN, 0};
    ASSERT_EQ(1, ::poll(&called, 1, 60'000));
    other_ = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    ::close(listener);
    poller_ = *Poller::create();
    LinkKeys keys;
    keys.send = KeyPair::make().private_key;
    keys.receive = KeyPair::make().private_key;
    stream_ = std::make_unique<MessageStream>(
        Link{fd_, keys}, *poller_,
        MessageStream::Options{.max_message = 100, .max_waiting = 64 << 10});
    sealer_.emplace(hkdf_expand(keys.receive, "baton messages"), Protection::kEncrypt);
    opener_.emplace(hkdf_expand(keys.send, "baton messages"), Protection::kEncrypt);
  }
  // A message as the other side sends it.
  std::string framed(std::string_view message) {
    std::string out(message.size() + kSealBytes, '\0');
    message.copy(out.data() + kSealPrefix, message.size());
    sealer_->head(out.data(), message.size());
    return out;
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
  std::optional<Sealer> sealer_;  // of the other end
  std::optional<Opener> opener_;
  int fd_ = -1;  // the stream's
  int other_ = -1;
};

using Words = std::vector<std::string>;

TEST_F(Stream, WholeMessagesHoweverTheyCome) {
  std::string words = framed("one");
  words += framed("");
  words += framed("three");
  put(words);
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
  char bytes[6 + kSealBytes];
  ASSERT_EQ(::recv(other_, bytes, sizeof bytes, MSG_WAITALL), static_cast<ssize_t>(sizeof bytes));
  EXPECT_EQ(std::string(bytes, sizeof bytes).find("answer"), std::string::npos);
  std::string_view answer;
  ASSERT_EQ(opener_->head(bytes, sizeof bytes, 100, answer), Opener::Found::kHead);
  EXPECT_EQ(answer, "answer");
}

// Promise(security): What verbs and ucx say beside their data, and what ranks tell the rendezvous,
//   is private and unchanged | every message is encrypted and numbered
TEST_F(Stream, WhatThePeerDidNotSendEndsIt) {
  const std::string one = framed("one");
  std::string two = framed("two");
  two.back() = static_cast<char>(two.back() ^ 1);
  put(one + two + framed("never heard"));
  EXPECT_EQ(hear(), Words{"one"});
  EXPECT_FALSE(stream_->open());
  EXPECT_NE(stream_->why().message().find("did not send"), absl::string_view::npos);
}

TEST_F(Stream, ARepeatedMessageEndsIt) {
  const std::string one = framed("one");
  put(one + one);
  EXPECT_EQ(hear(), Words{"one"});
  EXPECT_FALSE(stream_->open());
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
  std::string words = framed("good");
  words += framed(std::string(101, 'x'));
  words += framed("never heard");
  put(words);
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
  EXPECT_NE(stream_->why().message().find("does not read its messages"), absl::string_view::npos);
}

TEST_F(Stream, WhatWaitsGoesOutWhenThePeerReads) {
  // More than the kernel takes: the socket's buffer is made small, and nobody reads.
  const int small = 4096;
  setsockopt(fd_, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
  pollfd room{fd_, POLLOUT, 0};
  size_t sent = 0;
  for (int beyond = 0; beyond < 100 && stream_->open(); sent += 100) {
    stream_->send(std::string(100 - kSealBytes, 'x'));
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
