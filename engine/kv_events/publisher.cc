// The publisher's thread and sockets.
#include "engine/kv_events/sockets.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>
#include <zmq_addon.hpp>

#include "absl/strings/str_cat.h"
#include "transport/base/limits/event_fd.h"
#include "transport/base/log.h"

namespace baton::engine::kv_events {
namespace {

constexpr std::chrono::milliseconds kLinger{200};

int as_int(size_t number) { return static_cast<int>(std::min<size_t>(number, INT_MAX)); }

absl::Status no_endpoint(const std::string& endpoint, const zmq::error_t& error) {
  const char* remedy = error.num() == EADDRINUSE
                           ? "another process uses it: stop that process, or choose another port"
                           : "name an address of this machine, or tcp://*:PORT for all of them";
  return absl::UnavailableError(absl::StrCat("KV events cannot be published at ", endpoint, " (",
                                             error.what(), "): ", remedy));
}

class ZmqPublisher : public EventPublisher {
 public:
  explicit ZmqPublisher(const PublisherConfig& config) : config_(config) {}
  ~ZmqPublisher() override {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.ring();
    thread_.join();
  }

  absl::Status open();
  void publish(EventBatch batch) override;
  PublisherStats stats() const override {
    const std::lock_guard lock(mutex_);
    return stats_;
  }
  const std::string& endpoint() const override { return endpoint_; }
  const std::string& replay_endpoint() const override { return replay_endpoint_; }

 private:
  struct Sent {
    uint64_t sequence = 0;
    zmq::message_t payload;
  };
  void loop();
  void send(const EventBatch& batch);
  void answer_replays();
  void answer_replay(std::vector<zmq::message_t>& request);

  const PublisherConfig config_;
  const base::EventFd wake_;
  zmq::context_t context_;
  zmq::socket_t pub_;
  std::optional<zmq::socket_t> replay_;
  std::string endpoint_, replay_endpoint_;
  uint64_t next_ = 0;  // for the thread, as the buffer is
  std::deque<Sent> buffer_;
  mutable std::mutex mutex_;
  std::deque<EventBatch> waiting_;
  PublisherStats stats_;
  bool stop_ = false;
  std::thread thread_;
};

absl::Status ZmqPublisher::open() {
  if (!wake_.status().ok()) return wake_.status();
  const std::string* endpoint = &config_.endpoint;
  try {
    pub_ = zmq::socket_t(context_, zmq::socket_type::pub);
    pub_.set(zmq::sockopt::sndhwm, as_int(config_.hwm));
    pub_.set(zmq::sockopt::linger, static_cast<int>(kLinger.count()));
    if (config_.binds()) {
      pub_.bind(config_.endpoint);
    } else {
      pub_.connect(config_.endpoint);
    }
    endpoint_ = pub_.get(zmq::sockopt::last_endpoint);
    if (!config_.replay_endpoint.empty()) {
      endpoint = &config_.replay_endpoint;
      replay_.emplace(context_, zmq::socket_type::router);
      // A whole buffer for each requester; messages beyond it fail instead of vanishing.
      replay_->set(zmq::sockopt::sndhwm, as_int(config_.buffer_steps + 16));
      replay_->set(zmq::sockopt::router_mandatory, true);
      replay_->set(zmq::sockopt::maxmsgsize, int64_t{1024});
      replay_->set(zmq::sockopt::linger, static_cast<int>(kLinger.count()));
      replay_->bind(config_.replay_endpoint);
      replay_endpoint_ = replay_->get(zmq::sockopt::last_endpoint);
    }
  } catch (const zmq::error_t& error) {
    return no_endpoint(*endpoint, error);
  }
  publish({.events = {AllBlocksCleared()}});
  thread_ = std::thread([this] { loop(); });
  return absl::OkStatus();
}

void ZmqPublisher::publish(EventBatch batch) {
  using std::chrono::duration;
  batch.time = duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  batch.rank = 0;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.size() >= config_.max_queue_size) {
      waiting_.clear();
      ++stats_.overflows;
      waiting_.push_back({.time = batch.time, .events = {AllBlocksCleared()}, .rank = 0});
    }
    waiting_.push_back(std::move(batch));
  }
  wake_.ring();
}

void ZmqPublisher::send(const EventBatch& batch) {
  const std::string payload = encode_batch(batch);
  Sent sent{next_++, zmq::message_t(payload)};
  zmq::message_t copy;
  copy.copy(sent.payload);
  const std::string number = sequence_frame(sent.sequence);
  pub_.send(zmq::buffer(config_.topic), zmq::send_flags::sndmore);
  pub_.send(zmq::buffer(number), zmq::send_flags::sndmore);
  pub_.send(copy, zmq::send_flags::none);
  buffer_.push_back(std::move(sent));
  if (buffer_.size() > config_.buffer_steps) buffer_.pop_front();
  const std::lock_guard lock(mutex_);
  ++stats_.batches;
}

void ZmqPublisher::answer_replay(std::vector<zmq::message_t>& request) {
  const auto from =
      request.size() == 3 ? parse_sequence(request[2].to_string_view()) : std::optional<uint64_t>();
  if (!from.has_value()) {
    base::log_event(base::LogLevel::kInfo, "KV events: malformed request for a replay: %d frames",
                    static_cast<int>(request.size()));
    return;
  }
  const std::string client = request[0].to_string();
  uint64_t given = 0;
  const auto give = [&](const std::string& topic, uint64_t sequence, zmq::message_t payload) {
    const std::string number = sequence_frame(sequence);
    if (!replay_->send(zmq::buffer(client), zmq::send_flags::sndmore | zmq::send_flags::dontwait)) {
      return false;  // it takes nothing more; it will ask again
    }
    replay_->send(zmq::message_t(), zmq::send_flags::sndmore);
    replay_->send(zmq::buffer(topic), zmq::send_flags::sndmore);
    replay_->send(zmq::buffer(number), zmq::send_flags::sndmore);
    replay_->send(payload, zmq::send_flags::none);
    return true;
  };
  bool taken = true;
  for (Sent& sent : buffer_) {
    if (sent.sequence < *from) continue;
    zmq::message_t copy;
    copy.copy(sent.payload);
    taken = give(config_.topic, sent.sequence, std::move(copy));
    if (!taken) break;
    ++given;
  }
  if (taken) give("", kEndOfReplay, zmq::message_t());
  const std::lock_guard lock(mutex_);
  ++stats_.replays;
  stats_.replayed += given;
}

void ZmqPublisher::answer_replays() {
  for (;;) {
    std::vector<zmq::message_t> request;
    try {
      if (!zmq::recv_multipart(*replay_, std::back_inserter(request), zmq::recv_flags::dontwait)) {
        return;
      }
      answer_replay(request);
    } catch (const zmq::error_t& error) {
      // Whoever asked has left (EHOSTUNREACH).
      base::log_event(base::LogLevel::kDebug, "KV events: a replay ended early: %s", error.what());
    }
  }
}

void ZmqPublisher::loop() {
  for (;;) {
    std::vector<zmq::pollitem_t> items = {{nullptr, wake_.fd(), ZMQ_POLLIN, 0}};
    if (replay_.has_value()) items.push_back({replay_->handle(), 0, ZMQ_POLLIN, 0});
    std::deque<EventBatch> batches;
    bool stop = false;
    try {
      zmq::poll(items, std::chrono::milliseconds(-1));
      wake_.silence();
      {
        const std::lock_guard lock(mutex_);
        batches.swap(waiting_);
        stop = stop_;
      }
      for (const EventBatch& batch : batches) send(batch);
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) {
        base::log_event(base::LogLevel::kError, "KV events: sending failed: %s", error.what());
      }
    }
    if (stop) return;
    if (replay_.has_value()) answer_replays();
  }
}

}  // namespace

absl::Status can_publish() { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<EventPublisher>> EventPublisher::start(
    const PublisherConfig& config) {
  try {
    auto publisher = std::make_unique<ZmqPublisher>(config);
    if (absl::Status status = publisher->open(); !status.ok()) return status;
    return publisher;
  } catch (const zmq::error_t& error) {
    return base::refused("KV events: a ZeroMQ context", error.num());
  }
}

}  // namespace baton::engine::kv_events
