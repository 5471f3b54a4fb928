// GET /v1/baton/kv_events: what the prefix cache holds and how that changes, for as long as the
// client stays (engine/serve/cache/cache_events.h has the lines).
//
// A client that takes less than comes is given up, as HttpListenerOptions::max_unsent says, and
// begins with a new snapshot when it comes back. A snapshot has to fit in there too: 8 MiB are
// about 230,000 blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "engine/http/event_loop.h"
#include "engine/http/http_listener.h"
#include "engine/serve/engine_thread.h"

namespace baton::engine::http {

class CacheStream : public std::enable_shared_from_this<CacheStream> {
 public:
  // On the loop's thread. `engine` must outlive the listener that the exchange is of.
  static void start(serve::EngineThread& engine, const std::shared_ptr<EventLoop>& loop,
                    size_t max_unsent, std::shared_ptr<HttpExchange> exchange);

  CacheStream(std::weak_ptr<EventLoop> loop, std::string model, size_t max_unsent,
              std::shared_ptr<HttpExchange> exchange)
      : loop_(std::move(loop)),
        model_(std::move(model)),
        max_unsent_(max_unsent),
        exchange_(std::move(exchange)) {}

 private:
  void push(const serve::CacheNews* news);  // on the engine's thread
  void drain();                             // on the loop's

  const std::weak_ptr<EventLoop> loop_;
  const std::string model_;
  const size_t max_unsent_;
  const std::shared_ptr<HttpExchange> exchange_;
  std::mutex mutex_;
  std::string lines_;   // not handed to the loop yet
  size_t longest_ = 0;  // of them
  bool over_ = false;
  bool draining_ = false;
};

}  // namespace baton::engine::http
