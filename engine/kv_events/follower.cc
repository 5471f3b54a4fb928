// The follower's thread: a SUB socket for each source, what becomes of its connection, and a DEALER
// socket to ask for replays.
#include "engine/kv_events/sockets.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>
#include <zmq_addon.hpp>

#include "absl/strings/str_cat.h"
#include "engine/kv_events/token_index.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/log.h"

namespace baton::engine::kv_events {
namespace {

using std::chrono::milliseconds;
using Frames = std::vector<zmq::message_t>;

constexpr int64_t kMaxMessage = int64_t{16} << 20;
constexpr int kMaxWaiting = 100'000;  // batches; more are lost, and asked for again
constexpr int kBurst = 100;           // messages of one source before the next has its turn
constexpr milliseconds kHeartbeat{5000};
constexpr auto kSayAfter = std::chrono::seconds(5);  // without a connection
constexpr int kAskAfterFailure = 5;
constexpr auto kSayAgain = std::chrono::seconds(1);

// False: nothing is there.
bool receive(zmq::socket_t& socket, Frames* frames) {
  frames->clear();
  return zmq::recv_multipart(socket, std::back_inserter(*frames), zmq::recv_flags::dontwait)
      .has_value();
}

// One engine.
class Source {
 public:
  Source(zmq::context_t& context, const FollowerOptions& options, uint64_t id, std::string name,
         EventSource spec, EventFollower::OnNews on_news)
      : context_(context),
        options_(options),
        id_(id),
        name_(std::move(name)),
        spec_(std::move(spec)),
        on_news_(std::move(on_news)),
        order_(!spec_.replay_endpoint.empty(),
               {.apply = [this](std::string_view payload) { return apply(payload); },
                .doubt = [this](const std::string& why) { doubt(why); },
                .forget = [this](const std::string& why) { forget(why); },
                .ask = [this](uint64_t from) { ask(from); }}) {
    opened_ = Clock::steady().now();
    open();
  }

  void add_to(std::vector<zmq::pollitem_t>* items) {
    for (std::optional<zmq::socket_t>* socket : {&monitor_, &sub_, &dealer_}) {
      if (socket->has_value()) items->push_back({(*socket)->handle(), 0, ZMQ_POLLIN, 0});
    }
  }
  // Takes what has come, does what is due, and says what is new. True: there may be more.
  bool serve(Time now);
  Time due() const;
  void restart() { ended(Clock::steady().now()); }
  SourceStats stats() const { return {order_.stats(), index_.left_out()}; }

 private:
  void open();
  void shut();
  void ended(Time now);
  absl::Status apply(std::string_view payload);
  void doubt(const std::string& why);
  void forget(const std::string& why);
  void ask(uint64_t from);
  bool read_monitor(Time now);
  bool read_sub(Time now);
  bool read_dealer(Time now);
  void read_answer(const Frames& frames);
  void tell();
  void say(base::LogLevel level, const std::string& what);

  zmq::context_t& context_;
  const FollowerOptions& options_;
  const uint64_t id_;
  const std::string name_;
  const EventSource spec_;
  const EventFollower::OnNews on_news_;
  EventOrder order_;
  TokenIndex index_;
  std::optional<zmq::socket_t> sub_, monitor_, dealer_;
  int opens_ = 0;
  bool connected_ = false;
  bool told_ = false;   // a snapshot
  bool asked_ = false;  // an answer is awaited
  bool said_ = false;   // that there is no connection
  Time opened_{};
  Time reopen_at_{};  // where there are no sockets
  Time quiet_since_{};
  Time asked_at_{};
  Time answer_by_{};
  Time said_at_{};
};

void Source::say(base::LogLevel level, const std::string& what) {
  const Time now = Clock::steady().now();
  // A source that goes wrong all the time does not fill the log.
  if (said_at_ != Time{} && now - said_at_ < kSayAgain) level = base::LogLevel::kDebug;
  if (level >= base::LogLevel::kWarning) said_at_ = now;
  base::log_event(level, "KV events of %s (%s): %s", name_, spec_.endpoint, what);
}

void Source::open() {
  try {
    sub_.emplace(context_, zmq::socket_type::sub);
    sub_->set(zmq::sockopt::rcvhwm, kMaxWaiting);
    sub_->set(zmq::sockopt::linger, 0);
    sub_->set(zmq::sockopt::maxmsgsize, kMaxMessage);
    sub_->set(zmq::sockopt::ipv6, true);
    // A host that is gone without a word is noticed.
    sub_->set(zmq::sockopt::heartbeat_ivl, static_cast<int>(kHeartbeat.count()));
    sub_->set(zmq::sockopt::heartbeat_timeout, static_cast<int>(patient(3 * kHeartbeat).count()));
    sub_->set(zmq::sockopt::subscribe, spec_.topic);
    const std::string watched = absl::StrCat("inproc://monitor-", id_, "-", ++opens_);
    if (zmq_socket_monitor(sub_->handle(), watched.c_str(),
                           ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) != 0) {
      throw zmq::error_t();
    }
    monitor_.emplace(context_, zmq::socket_type::pair);
    monitor_->set(zmq::sockopt::linger, 0);
    monitor_->connect(watched);
    sub_->connect(spec_.endpoint);
  } catch (const zmq::error_t& error) {
    say(base::LogLevel::kError, absl::StrCat("cannot subscribe to it: ", error.what()));
    shut();
    reopen_at_ = Clock::steady().now() + std::chrono::minutes(1);
  }
}

void Source::shut() {
  if (sub_.has_value()) zmq_socket_monitor(sub_->handle(), nullptr, 0);
  dealer_.reset();
  monitor_.reset();
  sub_.reset();
  connected_ = asked_ = false;
}

// What the old sockets still have is of the connection that ended: it goes with them.
void Source::ended(Time now) {
  order_.disconnected();
  shut();
  reopen_at_ = now + options_.again;
}

absl::Status Source::apply(std::string_view payload) {
  const absl::StatusOr<EventBatch> batch = parse_batch(payload);
  if (!batch.ok()) return batch.status();
  index_.apply(*batch);
  return absl::OkStatus();
}

void Source::forget(const std::string& why) {
  index_.clear();
  doubt(why);
}

void Source::doubt(const std::string& why) {
  index_.tell_all();
  const bool told = std::exchange(told_, false);
  if (told) on_news_(nullptr);
  say(told ? base::LogLevel::kWarning : base::LogLevel::kInfo,
      absl::StrCat("its cache contents are no longer known: ", why));
}

void Source::ask(uint64_t from) {
  // No reader could tell an answer to an earlier question from one to this.
  if (std::exchange(asked_, true)) dealer_.reset();
  try {
    if (!dealer_.has_value()) {
      dealer_.emplace(context_, zmq::socket_type::dealer);
      dealer_->set(zmq::sockopt::rcvhwm, 0);
      dealer_->set(zmq::sockopt::linger, 0);
      dealer_->set(zmq::sockopt::maxmsgsize, kMaxMessage);
      dealer_->set(zmq::sockopt::ipv6, true);
      dealer_->connect(spec_.replay_endpoint);
    }
    const std::string number = sequence_frame(from);
    dealer_->send(zmq::message_t(), zmq::send_flags::sndmore | zmq::send_flags::dontwait);
    dealer_->send(zmq::buffer(number), zmq::send_flags::dontwait);
  } catch (const zmq::error_t& error) {
    say(base::LogLevel::kError,
        absl::StrCat("cannot request replays at ", spec_.replay_endpoint, ": ", error.what()));
  }
  asked_at_ = Clock::steady().now();
  answer_by_ = asked_at_ + options_.replay_timeout;
  base::log_event(base::LogLevel::kDebug, "KV events of %s: asked for all from batch %d on", name_,
                  from);
}

bool Source::read_monitor(Time now) {
  Frames frames;
  while (monitor_.has_value() && receive(*monitor_, &frames)) {
    uint16_t event = 0;
    if (frames.empty() || frames[0].size() < sizeof(event)) continue;
    std::memcpy(&event, frames[0].data(), sizeof(event));
    if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
      connected_ = true;
      said_ = false;
      quiet_since_ = now;
      order_.connected();
    } else if (event == ZMQ_EVENT_DISCONNECTED) {
      opened_ = now;
      ended(now);
    }
  }
  return false;
}

bool Source::read_sub(Time now) {
  Frames frames;
  for (int i = 0; i < kBurst; ++i) {
    if (!sub_.has_value() || !receive(*sub_, &frames)) return false;
    quiet_since_ = now;
    const auto sequence =
        frames.size() == 3 ? parse_sequence(frames[1].to_string_view()) : std::optional<uint64_t>();
    if (!sequence.has_value()) {
      say(base::LogLevel::kWarning,
          absl::StrCat("malformed event of ", frames.size(),
                       " frames: expected 3 (topic, 8-byte number, batch)"));
      continue;
    }
    order_.live(*sequence, frames[2].to_string());
  }
  return true;
}

void Source::read_answer(const Frames& frames) {
  // Behind the empty frame of a REQ socket; before vLLM 0.32 there was no topic.
  const size_t count = frames.size();
  const auto sequence = (count == 3 || count == 4) && frames[0].empty()
                            ? parse_sequence(frames[count - 2].to_string_view())
                            : std::optional<uint64_t>();
  if (!sequence.has_value()) {
    asked_ = false;
    dealer_.reset();
    return order_.replay_failed(absl::StrCat(spec_.replay_endpoint, " answers with ", count,
                                             " frames, which is not a replay of vLLM's"));
  }
  if (*sequence == kEndOfReplay) {
    asked_ = false;
    return order_.replay_ended();
  }
  order_.replayed(*sequence, frames[count - 1].to_string());
}

bool Source::read_dealer(Time now) {
  Frames frames;
  for (int i = 0; i < kBurst; ++i) {
    if (!dealer_.has_value() || !receive(*dealer_, &frames)) return false;
    quiet_since_ = now;
    answer_by_ = now + options_.replay_timeout;
    if (asked_) read_answer(frames);
  }
  return true;
}

void Source::tell() {
  if (order_.known() && (index_.has_news() || !told_)) {
    const serve::CacheNews news = index_.news();
    told_ = true;
    on_news_(&news);
  }
}

Time Source::due() const {
  if (!sub_.has_value()) return reopen_at_;
  if (!connected_) return said_ ? kNever : opened_ + kSayAfter;
  if (asked_) return answer_by_;
  if (spec_.replay_endpoint.empty()) return kNever;
  const Time quiet_until = quiet_since_ + options_.check_after;
  // However much comes.
  return order_.began_in_the_middle()
             ? std::min(quiet_until, asked_at_ + kAskAfterFailure * options_.check_after)
             : quiet_until;
}

bool Source::serve(Time now) {
  bool more = false;
  try {
    more |= read_monitor(now);
    more |= read_sub(now);
    more |= read_dealer(now);
  } catch (const zmq::error_t& error) {
    say(base::LogLevel::kError, error.what());
    ended(now);
  }
  if (now >= due()) {
    if (!sub_.has_value()) {
      open();
    } else if (!connected_) {
      said_ = true;
      say(base::LogLevel::kWarning,
          "no connection, so its cache contents are unknown; reconnecting");
    } else if (asked_) {
      asked_ = false;
      dealer_.reset();
      order_.replay_failed(absl::StrCat("a replay that was asked for at ", spec_.replay_endpoint,
                                        " did not arrive"));
      quiet_since_ = now;
    } else {
      quiet_since_ = now;
      order_.check();
    }
  }
  tell();
  return more;
}

// The thread alone touches sockets; `mutex_` is what callers share with it.
class ZmqFollower : public EventFollower {
 public:
  explicit ZmqFollower(FollowerOptions options) : options_(options) {}
  absl::Status open() {
    if (wake_.status().ok()) thread_ = std::thread([this] { loop(); });
    return wake_.status();
  }
  ~ZmqFollower() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.ring();
    thread_.join();
  }

  uint64_t follow(std::string name, EventSource source, OnNews on_news) override {
    const std::lock_guard lock(mutex_);
    const uint64_t id = next_id_++;
    listeners_[id] = std::move(on_news);
    joining_.push_back({id, std::move(name), std::move(source)});
    wake_.ring();
    return id;
  }
  void leave(uint64_t id) override {
    const std::lock_guard lock(mutex_);
    listeners_.erase(id);
    stats_.erase(id);
    wake_.ring();
  }
  void restart(uint64_t id) override {
    const std::lock_guard lock(mutex_);
    restarts_.insert(id);
    wake_.ring();
  }
  SourceStats stats(uint64_t id) const override {
    const std::lock_guard lock(mutex_);
    const auto it = stats_.find(id);
    return it == stats_.end() ? SourceStats() : it->second;
  }

 private:
  struct Joining {
    uint64_t id = 0;
    std::string name;
    EventSource spec;
  };
  void loop();
  bool take_orders();
  void hear(uint64_t id, const serve::CacheNews* news);
  void wait(bool more);

  const FollowerOptions options_;
  const base::EventFd wake_;
  zmq::context_t context_;
  std::map<uint64_t, std::unique_ptr<Source>> sources_;  // of the thread
  mutable std::mutex mutex_;
  std::map<uint64_t, EventFollower::OnNews> listeners_;
  std::map<uint64_t, SourceStats> stats_;
  std::vector<Joining> joining_;
  std::set<uint64_t> restarts_;
  uint64_t next_id_ = 1;
  bool stop_ = false;
  std::thread thread_;
};

// Under the lock, so that no listener hears anything behind leave().
void ZmqFollower::hear(uint64_t id, const serve::CacheNews* news) {
  const std::lock_guard lock(mutex_);
  if (const auto it = listeners_.find(id); it != listeners_.end()) it->second(news);
}

// False: it is over.
bool ZmqFollower::take_orders() {
  std::vector<Joining> joining;
  std::set<uint64_t> restarts;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return false;
    joining.swap(joining_);
    restarts.swap(restarts_);
    std::erase_if(sources_,
                  [this](const auto& entry) { return !listeners_.contains(entry.first); });
    std::erase_if(joining, [this](const Joining& entry) { return !listeners_.contains(entry.id); });
  }
  for (Joining& entry : joining) {
    const uint64_t id = entry.id;
    sources_[id] = std::make_unique<Source>(
        context_, options_, id, std::move(entry.name), std::move(entry.spec),
        [this, id](const serve::CacheNews* news) { hear(id, news); });
  }
  for (const uint64_t id : restarts) {
    if (const auto it = sources_.find(id); it != sources_.end()) it->second->restart();
  }
  return true;
}

void ZmqFollower::wait(bool more) {
  std::vector<zmq::pollitem_t> items = {{nullptr, wake_.fd(), ZMQ_POLLIN, 0}};
  Time due = kNever;
  for (const auto& [id, source] : sources_) {
    source->add_to(&items);
    due = std::min(due, source->due());
  }
  milliseconds timeout(-1);
  if (more) {
    timeout = milliseconds(0);
  } else if (due != kNever) {
    timeout =
        std::max(milliseconds(0), std::chrono::ceil<milliseconds>(due - Clock::steady().now()));
  }
  try {
    zmq::poll(items, timeout);
  } catch (const zmq::error_t&) {
    // A signal: what there is, is looked at all the same.
  }
  wake_.silence();
}

void ZmqFollower::loop() {
  bool more = false;
  while (take_orders()) {
    wait(std::exchange(more, false));
    for (const auto& [id, source] : sources_) {
      more |= source->serve(Clock::steady().now());
      const SourceStats stats = source->stats();
      const std::lock_guard lock(mutex_);
      if (listeners_.contains(id)) stats_[id] = stats;
    }
  }
  sources_.clear();
}

}  // namespace

absl::StatusOr<std::unique_ptr<EventFollower>> EventFollower::start(FollowerOptions options) {
  try {
    auto follower = std::make_unique<ZmqFollower>(options);
    if (absl::Status status = follower->open(); !status.ok()) return status;
    return follower;
  } catch (const zmq::error_t& error) {
    return base::refused("KV events: a ZeroMQ context", error.num());
  }
}

}  // namespace baton::engine::kv_events
