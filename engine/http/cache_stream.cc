// Carries cache events from the engine's thread to the loop's; neither waits for the other.
#include "engine/http/cache_stream.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace baton::engine::http {
namespace {

using namespace std::chrono_literals;

// A client that left is only noticed by what is sent to it, and a cache may be quiet for long.
// Everything on the loop's thread; owned by the connection.
class Heartbeat : public std::enable_shared_from_this<Heartbeat> {
 public:
  Heartbeat(std::weak_ptr<EventLoop> loop, std::shared_ptr<HttpExchange> exchange)
      : loop_(std::move(loop)), exchange_(std::move(exchange)) {}

  void beat() {
    const auto loop = loop_.lock();
    if (loop == nullptr || exchange_->gone()) return;
    next_ = loop->after(1s, [weak = weak_from_this()] {
      const auto self = weak.lock();
      if (self == nullptr) return;
      self->exchange_->write("\n");
      self->beat();
    });
  }

 private:
  const std::weak_ptr<EventLoop> loop_;
  const std::shared_ptr<HttpExchange> exchange_;
  std::unique_ptr<EventLoop::Timer> next_;
};

}  // namespace

void CacheStream::start(serve::EngineThread& engine, const std::shared_ptr<EventLoop>& loop,
                        size_t max_unsent, std::shared_ptr<HttpExchange> exchange) {
  const auto stream =
      std::make_shared<CacheStream>(loop, engine.fingerprint(), max_unsent, std::move(exchange));
  stream->exchange_->set_endless();
  stream->exchange_->begin(200, "application/x-ndjson");
  const uint64_t id =
      engine.watch_cache([stream](const serve::CacheNews* news) { stream->push(news); });
  const auto heartbeat = std::make_shared<Heartbeat>(loop, stream->exchange_);
  heartbeat->beat();
  stream->exchange_->on_gone([&engine, id, heartbeat] { engine.unwatch_cache(id); });
}

void CacheStream::push(const serve::CacheNews* news) {
  {
    const std::lock_guard lock(mutex_);
    if (over_) return;
    if (news != nullptr) {
      const std::string line = serve::cache_line(*news, model_);
      longest_ = std::max(longest_, line.size());
      lines_ += line;
    }
    // The loop does not come round to it: better a new beginning than a heap of old news. But one
    // line, a whole cache perhaps, is as long as it is.
    over_ = news == nullptr || lines_.size() - longest_ > max_unsent_;
    if (std::exchange(draining_, true)) return;
  }
  if (const auto loop = loop_.lock(); loop != nullptr) {
    loop->post([self = shared_from_this()] { self->drain(); });
  }
}

void CacheStream::drain() {
  std::string lines;
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    lines.swap(lines_);
    longest_ = 0;
    draining_ = false;
    over = over_;
  }
  // The listener gives up a client that leaves too much lying.
  if (!lines.empty()) exchange_->write(std::move(lines));
  if (over) exchange_->end();
}

}  // namespace baton::engine::http
