// Sockets of the `lm://` wire: one thread, one epoll, one session for each connection.
#include "kvtransfer/store/lm_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/limits/refusals.h"
#include "transport/base/log.h"
#include "transport/base/unique_fd.h"
#include "transport/net/endpoint.h"

namespace baton::kvtransfer::store {
namespace {

constexpr int kSlowTickMs = 500;   // how often slow clients are looked for
constexpr size_t kTurn = 4 << 20;  // bytes of one connection before the next has its turn
constexpr size_t kMostAtOnce = 1 << 20;
constexpr Time kStrangers = std::chrono::seconds(20);  // connections without a request so far

class Server final : public LmServer {
 public:
  Server(const LmServerOptions& options, BlockArena& arena) : options_(options), arena_(arena) {}
  ~Server() override;
  absl::Status open();
  uint16_t port() const override { return port_; }
  LmServerStats stats() const override;

 private:
  struct Connection {
    Connection(base::UniqueFd socket, BlockArena& arena, LmTotals& totals, Time now)
        : fd(std::move(socket)), session(arena, totals), since(now) {}
    base::UniqueFd fd;
    LmSession session;
    const Time since;   // it was accepted
    bool busy = false;  // a request is half here, or a reply half sent
    Time busy_since{};
    uint64_t turn = 0;     // what it is at
    bool writing = false;  // epoll waits for room to write
    std::list<Connection>::iterator self;
  };

  void loop();
  void accept_all(Time now);
  bool make_room();
  // False: close it.
  bool serve(Connection& connection, Time now);
  bool read_some(Connection& connection, Time now, bool* moved);
  bool write_some(Connection& connection, bool* moved);
  void wait_for(Connection& connection);
  void look_for_slow(Time now);
  void close(Connection& connection) { connections_.erase(connection.self); }

  const LmServerOptions options_;
  BlockArena& arena_;
  uint16_t port_ = 0;
  base::UniqueFd listener_, epoll_;
  base::EventFd stop_;
  bool listening_ = true;  // false: no descriptor was left for a newcomer
  std::list<Connection> connections_;
  LmTotals totals_;
  LmServerStats mine_;
  mutable std::mutex mutex_;
  LmServerStats published_;
  std::thread thread_;
};

absl::Status failed(const LmServerOptions& options, const char* what) {
  return absl::UnavailableError(absl::StrCat("lm://", options.host, ":", options.port, ": ", what,
                                             ": ", std::strerror(errno)));
}

absl::Status Server::open() {
  auto listening = net::listen_on(options_.host, options_.port, {.buffer_bytes = 0});
  if (!listening.ok()) {
    return absl::Status(listening.status().code(),
                        absl::StrCat("lm://: ", listening.status().message()));
  }
  listener_.reset(*listening);
  if (listen(listener_.get(), 512) != 0) return failed(options_, "listen() failed");
  port_ = net::local_of(listener_.get()).port();
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return base::refused("epoll_create1", errno);
  if (!stop_.status().ok()) return stop_.status();
  epoll_event listen_event{.events = EPOLLIN, .data = {.ptr = &listener_}};
  epoll_event stop_event{.events = EPOLLIN, .data = {.ptr = &stop_}};
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &listen_event) != 0 ||
      epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, stop_.fd(), &stop_event) != 0) {
    return base::refused("epoll_ctl", errno);
  }
  thread_ = std::thread([this] { loop(); });
  return absl::OkStatus();
}

Server::~Server() {
  if (!thread_.joinable()) return;
  stop_.ring();
  thread_.join();
}

LmServerStats Server::stats() const {
  const std::lock_guard lock(mutex_);
  return published_;
}

// --- connections ---------------------------------------------------------------------------------

// A client that has never made a request goes, the first of them first.
bool Server::make_room() {
  const auto stranger = std::ranges::find_if(
      connections_, [](const Connection& c) { return !c.session.has_spoken(); });
  if (stranger == connections_.end()) return false;
  connections_.erase(stranger);
  ++mine_.turned_away;
  return true;
}

void Server::accept_all(Time now) {
  for (;;) {
    base::UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!fd.valid()) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN) return;
      // No descriptor is left. One that has never spoken gives his; else all wait until one is
      // free.
      if (make_room()) continue;
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      listening_ = false;
      return;
    }
    if (connections_.size() >= options_.connections && !make_room()) {
      ++mine_.turned_away;
      continue;
    }
    const int one = 1;
    setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    connections_.emplace_back(std::move(fd), arena_, totals_, now);
    Connection& connection = connections_.back();
    connection.self = std::prev(connections_.end());
    epoll_event event{.events = EPOLLIN, .data = {.ptr = &connection}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, connection.fd.get(), &event) != 0) close(connection);
  }
}

// Connections that have made no request, or are at one for too long.
void Server::look_for_slow(Time now) {
  for (auto it = connections_.begin(); it != connections_.end();) {
    const bool stranger = !it->session.has_spoken() && now >= it->since + kStrangers;
    if (stranger || (it->busy && now >= it->busy_since + it->session.allowance())) {
      ++mine_.too_slow;
      it = connections_.erase(it);
    } else {
      ++it;
    }
  }
  if (listening_) return;
  epoll_event event{.events = EPOLLIN, .data = {.ptr = &listener_}};
  listening_ = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), &event) == 0;
}

// --- bytes ---------------------------------------------------------------------------------------

bool Server::read_some(Connection& connection, Time now, bool* moved) {
  const std::span<std::byte> room = connection.session.room();
  const ssize_t n = recv(connection.fd.get(), room.data(), std::min(room.size(), kMostAtOnce), 0);
  *moved = n > 0;
  if (n > 0) connection.session.filled(static_cast<size_t>(n), now);
  if (n == 0 || connection.session.broken()) return false;
  return n > 0 || errno == EAGAIN || errno == EINTR;
}

bool Server::write_some(Connection& connection, bool* moved) {
  const std::span<const std::byte> bytes = connection.session.to_send();
  const ssize_t n =
      send(connection.fd.get(), bytes.data(), std::min(bytes.size(), kMostAtOnce), MSG_NOSIGNAL);
  *moved = n > 0;
  if (n > 0) connection.session.sent(static_cast<size_t>(n));
  return n > 0 || errno == EAGAIN || errno == EINTR;
}

bool Server::serve(Connection& connection, Time now) {
  LmSession& session = connection.session;
  bool moved = true;
  for (size_t steps = 0; moved && steps < kTurn / kMostAtOnce * 16; ++steps) {
    const bool fine =
        session.wants_bytes() ? read_some(connection, now, &moved) : write_some(connection, &moved);
    if (!fine) return false;
    const bool busy = !session.idle();
    const uint64_t turn = session.turn();
    if ((busy && !connection.busy) || connection.turn != turn) connection.busy_since = now;
    connection.busy = busy;
    connection.turn = turn;
  }
  wait_for(connection);
  return true;
}

void Server::wait_for(Connection& connection) {
  const bool writing = !connection.session.wants_bytes();
  if (writing == connection.writing) return;
  connection.writing = writing;
  epoll_event event{.events = writing ? EPOLLOUT : EPOLLIN, .data = {.ptr = &connection}};
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.fd.get(), &event);
}

void Server::loop() {
  epoll_event events[64];
  Time looked{};
  for (;;) {
    const int count = epoll_wait(epoll_.get(), events, 64, kSlowTickMs);
    const Time now = Clock::steady().now();
    bool newcomers = false;
    for (int i = 0; i < count; ++i) {
      void* which = events[i].data.ptr;
      if (which == &stop_) return;
      if (which == &listener_) {
        newcomers = true;
        continue;
      }
      auto& connection = *static_cast<Connection*>(which);
      if (!serve(connection, now)) close(connection);
    }
    // Last: it may close others, whose events have been looked at by now.
    if (newcomers) accept_all(now);
    if (now - looked >= std::chrono::milliseconds(kSlowTickMs)) {
      look_for_slow(now);
      looked = now;
    }
    const std::lock_guard lock(mutex_);
    published_ = mine_;
    published_.totals = totals_;
    published_.connections = connections_.size();
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<LmServer>> LmServer::start(const LmServerOptions& options,
                                                          BlockArena& arena) {
  auto server = std::make_unique<Server>(options, arena);
  if (absl::Status status = server->open(); !status.ok()) return status;
  return server;
}

}  // namespace baton::kvtransfer::store

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace baton::kvtransfer::store {
namespace {

constexpr size_t kListBytes = 64 << 10;  // of keys in one answer
constexpr Time kPatience = std::chrono::seconds(20);
constexpr size_t kSlowest = 1 << 20;  // bytes of a value per second

// What lies beside a value: how the client described it, and its sum. Values lie in the arena
// behind their key.
struct Tag {
  LmMeta meta;
  uint64_t sum = 0;
};
constexpr size_t kTagBytes = sizeof(LmMeta) + sizeof(uint64_t);
static_assert(kTagBytes == 36);

const tiers::TierKey& key_for(std::string_view name, tiers::TierKey* key) {
  static const auto* keys = new tiers::TierKeys({.layout = "lm wire"});
  return *key = keys->key(name);
}

std::string pack(const Tag& tag) {
  std::string out(kTagBytes, '\0');
  std::memcpy(out.data(), &tag.meta, sizeof(tag.meta));
  std::memcpy(out.data() + sizeof(tag.meta), &tag.sum, sizeof(tag.sum));
  return out;
}

std::optional<Tag> unpack(std::string_view bytes) {
  Tag tag;
  if (bytes.size() != kTagBytes) return std::nullopt;
  std::memcpy(&tag.meta, bytes.data(), sizeof(tag.meta));
  std::memcpy(&tag.sum, bytes.data() + sizeof(tag.meta), sizeof(tag.sum));
  return tag;
}

uint64_t sum_of(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

// Thrown-away bytes of all sessions; no code reads it.
std::span<std::byte> waste() {
  thread_local std::array<std::byte, 64 << 10> bytes;
  return bytes;
}

}  // namespace

std::span<std::byte> LmSession::room() {
  if (!in_value_) return std::span(header_).subspan(have_);
  const size_t left = expected_ - arrived_;
  if (incoming_ == nullptr) return waste().first(std::min(left, waste().size()));
  return incoming_->bytes().subspan(kLmKey + arrived_, left);
}

void LmSession::filled(size_t bytes, Time now) {
  if (!in_value_) {
    have_ += bytes;
    if (have_ == header_.size()) take_request(now);
    return;
  }
  arrived_ += bytes;
  if (arrived_ == expected_) keep_value();
}

void LmSession::take_request(Time now) {
  request_ = decode_lm_request(header_);
  have_ = 0;
  spoken_ = true;
  ++turn_;
  turn_bytes_ = 0;
  switch (static_cast<LmCommand>(request_.command)) {
    case LmCommand::kPut:
      return begin_value(now);
    case LmCommand::kGet:
      return get();
    case LmCommand::kExist: {
      tiers::TierKey key;
      const bool here = arena_.contains(key_for(request_.key(), &key));
      return reply(here ? LmCode::kSuccess : LmCode::kFail, 0, {});
    }
    case LmCommand::kList:
      return list();
    case LmCommand::kHealth:
      return reply(LmCode::kSuccess, 0, {});
  }
  spoken_ = false;
  broken_ = true;
  ++totals_.broken;
}

// What arrives at a time may take a quarter of the arena, so that clients that send nothing hold no
// more.
void LmSession::begin_value(Time now) {
  if (request_.length < 0) {
    broken_ = true;
    ++totals_.broken;
    return;
  }
  ++totals_.puts;
  in_value_ = true;
  expected_ = static_cast<size_t>(request_.length);
  arrived_ = 0;
  turn_bytes_ = expected_;
  const size_t size = kLmKey + expected_;
  if (totals_.arriving == 0 || totals_.arriving + size <= arena_.capacity() / 4) {
    incoming_ = arena_.take(size, now);
  }
  if (incoming_ != nullptr) {
    totals_.arriving += size;
    std::memcpy(incoming_->bytes().data(), request_.key_bytes.data(), kLmKey);
  } else {
    ++totals_.dropped;
  }
  if (expected_ == 0) keep_value();
}

void LmSession::end_value() {
  if (incoming_ != nullptr) totals_.arriving -= incoming_->bytes().size();
  incoming_.reset();
  in_value_ = false;
}

void LmSession::keep_value() {
  if (incoming_ != nullptr) {
    const Tag tag{request_.meta, sum_of(incoming_->bytes().subspan(kLmKey))};
    tiers::TierKey key;
    arena_.publish(key_for(request_.key(), &key), incoming_, pack(tag));
  }
  end_value();
  ++turn_;
  turn_bytes_ = 0;
}

void LmSession::reply(LmCode code, int32_t length, const LmMeta& meta) {
  head_ = encode_lm_reply(code, length, meta);
  head_left_ = head_.size();
  turn_bytes_ = body_.size();
}

void LmSession::get() {
  ++totals_.gets;
  tiers::TierKey key;
  const BlockArena::Found found = arena_.find(key_for(request_.key(), &key));
  const std::optional<Tag> tag = unpack(found.tag());
  if (found.space == nullptr || !tag.has_value()) return reply(LmCode::kFail, 0, {});
  const auto value = std::span<const std::byte>(found.space->bytes()).subspan(kLmKey);
  if (sum_of(value) != tag->sum) {
    ++totals_.corrupt;
    return reply(LmCode::kFail, 0, {});
  }
  ++totals_.hits;
  outgoing_ = found.space;
  body_ = value;
  reply(LmCode::kSuccess, static_cast<int32_t>(value.size()), tag->meta);
}

// Keys, a line for each, of those that were used last.
void LmSession::list() {
  text_.clear();
  arena_.each_from_the_newest([&](const BlockArena::Found& block) {
    if (!unpack(block.tag()).has_value()) return true;
    const std::string_view padded(reinterpret_cast<const char*>(block.space->bytes().data()),
                                  kLmKey);
    const size_t last = padded.find_last_not_of(' ');
    if (text_.size() + kLmKey + 1 > kListBytes) return false;
    if (!text_.empty()) text_ += '\n';
    text_ += padded.substr(0, last == std::string_view::npos ? 0 : last + 1);
    return true;
  });
  body_ = std::as_bytes(std::span(text_));
  reply(LmCode::kSuccess, static_cast<int32_t>(text_.size()), {});
}

std::span<const std::byte> LmSession::to_send() const {
  if (head_left_ > 0) return std::span(head_).last(head_left_);
  return body_;
}

void LmSession::sent(size_t bytes) {
  if (head_left_ > 0) {
    head_left_ -= bytes;
  } else {
    body_ = body_.subspan(bytes);
  }
  if (head_left_ > 0 || !body_.empty()) return;
  outgoing_.reset();
  text_ = {};
  ++turn_;
}

Time LmSession::allowance() const {
  return kPatience + std::chrono::seconds(turn_bytes_ / kSlowest);
}

}  // namespace baton::kvtransfer::store
