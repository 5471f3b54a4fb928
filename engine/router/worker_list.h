// A worker as it is listed, on the command line or in the file that says which workers there are
// (`baton serve --role router --workers FILE`).
//
//   # one worker a line: its role, where it listens, and where it is (distance.h; by default, the
//   # host of its URL)
//   prefill http://10.0.0.1:8001 rack1/host1
//   decode  http://10.0.0.2:8002 rack1/host2
//   # vLLM's, with where it publishes what it has cached (engine/kv_events/config.h)
//   decode  http://10.0.0.3:8000 rack1/host3 kv_events=tcp://10.0.0.3:5557
//   replay=tcp://10.0.0.3:5558
//
// On the command line its words have commas between them: --decode URL,kv_events=...,replay=...
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/http/http_fetch.h"
#include "engine/kv_events/config.h"

namespace baton::engine::router {

struct ListedWorker {
  http::HttpUrl url;
  std::string place;
  std::string text() const { return url.text(); }
  // Where it tells what it has cached; nothing: at its URL, as a Baton worker does.
  std::optional<kv_events::EventSource> events;
};
struct ListedWorkers {
  std::vector<ListedWorker> prefill, decode;
};

// A URL, and behind it in any order a place, kv_events=, replay= and topic=. InvalidArgument says
// which word is wrong, and how it looks.
absl::StatusOr<ListedWorker> parse_worker(std::string_view text);

// InvalidArgument names the line and what is wrong with it: a role that is neither, a URL that is
// none, a place that is none, a worker that is listed twice; also without any decode worker, and
// where the last line has no end, for then the writer may be writing still.
absl::StatusOr<ListedWorkers> parse_worker_list(std::string_view text);

}  // namespace baton::engine::router
