// Reads every worker's stream of cache events, line by line.
#include "engine/router/cache_watch.h"

#include "absl/strings/str_cat.h"
#include "engine/serve/cache/cache_events.h"
#include "transport/base/log.h"

namespace baton::engine::router {

void CacheWatch::follow(WorkerGroup& group, size_t worker) {
  Follower& follower = followers_[{&group, worker}];
  follower.group = &group;
  follower.worker = worker;
  begin(follower);
}

void CacheWatch::leave(const WorkerGroup& group, size_t worker) {
  const auto it = followers_.find({&group, worker});
  if (it == followers_.end()) return;
  it->second.group->picker.forget_cache(worker);
  followers_.erase(it);
}

void CacheWatch::restart(WorkerGroup& group, size_t worker) {
  const auto it = followers_.find({&group, worker});
  if (it == followers_.end()) return;
  if (it->second.fetch == nullptr) return;
  broken(it->second, absl::UnavailableError("it no longer answers"));
}

void CacheWatch::begin(Follower& follower) {
  follower.status = 0;
  follower.line.clear();
  follower.begun = false;
  http::HttpFetchRequest get;
  get.url = follower.group->urls[follower.worker];
  get.path = "/v1/baton/kv_events";
  get.headers = workers_.headers();
  get.trust = workers_.trust;
  follower.fetch = http::HttpFetch::start(
      workers_.loop, std::move(get),
      {.on_head = [&follower](int status, std::string_view) { follower.status = status; },
       .on_body =
           [this, &follower](std::string_view bytes) {
             if (absl::Status status = receive(follower, bytes); !status.ok()) {
               broken(follower, status);
             }
           },
       .on_end =
           [this, &follower](const absl::Status& status) {
             broken(follower, status.ok() ? absl::UnavailableError("it ended") : status);
           }});
}

absl::Status CacheWatch::receive(Follower& follower, std::string_view bytes) {
  if (follower.status != 200) {
    return absl::NotFoundError(absl::StrCat("status ", follower.status));
  }
  for (;;) {
    const size_t end = bytes.find('\n');
    follower.line += bytes.substr(0, end);
    if (follower.line.size() > kMaxLine) {
      return absl::InvalidArgumentError(absl::StrCat("a line is longer than ", kMaxLine, " bytes"));
    }
    if (end == std::string_view::npos) return absl::OkStatus();
    bytes.remove_prefix(end + 1);
    if (follower.line.empty()) continue;  // it is still there
    const absl::StatusOr<serve::CacheNews> news = serve::parse_cache_line(follower.line);
    follower.line.clear();
    if (!news.ok()) return news.status();
    if (news->snapshot) follower.group->set_model(follower.worker, news->root, news->model);
    if (news->snapshot == follower.begun || !follower.group->picker.tell(follower.worker, *news)) {
      return absl::InvalidArgumentError("its lines are not consecutive");
    }
    follower.begun = true;
    follower.said = false;
  }
}

void CacheWatch::broken(Follower& follower, const absl::Status& why) {
  follower.group->picker.forget_cache(follower.worker);
  if (follower.begun) ++lost_;
  follower.begun = false;
  follower.fetch.reset();
  follower.next = workers_.loop->after(again_, [this, &follower] { begin(follower); });
  if (std::exchange(follower.said, true)) return;
  base::log_event(absl::IsInvalidArgument(why) ? base::LogLevel::kWarning : base::LogLevel::kInfo,
                  "router: %s worker %s does not report its cache: %s", follower.group->role,
                  follower.group->name(follower.worker), std::string(why.message()));
}

}  // namespace baton::engine::router
