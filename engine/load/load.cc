// Timers for arrivals, a queue for those that may not be sent yet, and a count of the open ones.
#include "engine/load/load.h"

#include <algorithm>
#include <future>
#include <memory>
#include <utility>

namespace baton::engine::load {
namespace {

// For the loop's thread only.
class Run {
 public:
  Run(std::shared_ptr<http::EventLoop> loop, const Server& server,
      const std::vector<LoadRequest>& requests, const LoadOptions& options)
      : loop_(std::move(loop)),
        server_(server),
        requests_(requests),
        options_(options),
        fetches_(requests.size()) {
    result_.answers.resize(requests.size());
  }

  std::future<void> ended() { return ended_.get_future(); }

  void start() {
    begin_ = now();
    if (requests_.empty()) return finish();
    send_due();
  }

  LoadResult take() { return std::move(result_); }

 private:
  static Time now() { return Clock::steady().now(); }
  Time due(size_t request) const {
    return begin_ + (options_.at.empty() ? Time{} : options_.at[request]);
  }

  void send_due() {
    while (next_ < requests_.size() && now() >= due(next_)) {
      if (options_.concurrency > 0 && open_ >= options_.concurrency) return;  // an answer calls
      send(next_++);
    }
    if (next_ == requests_.size()) return;
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(due(next_) - now());
    timer_ = loop_->after(std::max(wait, std::chrono::milliseconds(0)), [this] { send_due(); });
  }

  void send(size_t request) {
    result_.most_open = std::max(result_.most_open, ++open_);
    const Time sent = now() - begin_;
    fetches_[request] = ask(loop_, server_, requests_[request], options_.seed + request,
                            options_.timeout, [this, request, sent](Answer answer) {
                              answer.sent = sent;
                              answered(request, std::move(answer));
                            });
  }

  void answered(size_t request, Answer answer) {
    result_.answers[request] = std::move(answer);
    --open_;
    if (++answered_ == requests_.size()) return finish();
    send_due();
  }

  void finish() {
    result_.duration = now() - begin_;
    timer_.reset();
    ended_.set_value();
  }

  const std::shared_ptr<http::EventLoop> loop_;
  const Server& server_;
  const std::vector<LoadRequest>& requests_;
  const LoadOptions& options_;
  std::vector<std::unique_ptr<http::HttpFetch>> fetches_;
  std::unique_ptr<http::EventLoop::Timer> timer_;
  std::promise<void> ended_;
  LoadResult result_;
  Time begin_{};
  size_t next_ = 0;
  size_t open_ = 0;
  size_t answered_ = 0;
};

}  // namespace

LoadResult run_load(const std::shared_ptr<http::EventLoop>& loop, const Server& server,
                    const std::vector<LoadRequest>& requests, const LoadOptions& options) {
  auto run = std::make_shared<Run>(loop, server, requests, options);
  std::future<void> ended = run->ended();
  loop->post([run] { run->start(); });
  ended.get();
  // Its fetches and its timer end on the loop's thread.
  std::promise<LoadResult> result;
  loop->post([&result, last = std::move(run)]() mutable {
    LoadResult taken = last->take();
    last.reset();
    result.set_value(std::move(taken));
  });
  return result.get_future().get();
}

}  // namespace baton::engine::load
