// One rank, started by somebody else's launcher: finds its place, meets the others, says so.
#include <unistd.h>

#include <cstdio>
#include <string>

#include "collectives/launch.h"
#include "collectives/rendezvous.h"

using namespace baton;
using namespace baton::collectives;

namespace {

int fail(const absl::Status& why) {
  std::fprintf(stderr, "%s\n", why.ToString().c_str());
  return 1;
}

}  // namespace

int main() {
  const auto place = launch::from_environment();
  if (!place.ok()) return fail(place.status());
  if (!place->has_value()) return fail(absl::NotFoundError("no launcher"));
  const launch::Place& here = **place;
  const auto key = ClusterKey::from_bytes("the key of the launchers' test");
  std::unique_ptr<RendezvousServer> server;
  if (here.serves) {
    auto started =
        RendezvousServer::start_at(*key, here.rendezvous, static_cast<uint32_t>(here.ranks));
    if (!started.ok()) return fail(started.status());
    server = *std::move(started);
  }
  RankInfo info{.rank = static_cast<uint32_t>(here.rank),
                .ranks = static_cast<uint32_t>(here.ranks)};
  info.version = kCollectivesVersion;
  info.pid = static_cast<uint32_t>(getpid());
  const auto rank_infos = meet(here.rendezvous, *key, info, std::chrono::minutes(1));
  if (!rank_infos.ok()) return fail(rank_infos.status());
  std::printf("%s rank %d of %d, local %d of %d\n", here.launcher.c_str(), here.rank, here.ranks,
              here.local_rank, here.local_ranks);
  return 0;
}
