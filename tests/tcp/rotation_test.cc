// Changing the cluster's key while it works: three workers, restarted one after the other.
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/worker.h"

namespace baton::tcp {
namespace {

constexpr const char* kOld = "the old key of this cluster";
constexpr const char* kNew = "the new key of this cluster";

std::unique_ptr<Worker> start(TemporaryFolder& folder, const std::string& keys) {
  folder.file("cluster.key", keys);
  EXPECT_EQ(chmod(folder.path("cluster.key").c_str(), 0600), 0);
  auto key = must(ClusterKey::from_file(folder.path("cluster.key")));
  return Worker::create(
             {.name = "w", .providers = {"tcp"}, .key = key, .settings = {{"tcp.sockets", "1"}}})
      .value();
}

// Whether a notification gets from one to the other over a new connection, and why not.
absl::Status reaches(Worker& from, Worker& to) {
  auto peer = from.connect(to.address());
  if (!peer.ok()) return peer.status();
  auto id = from.notify(*peer, "hello");
  if (!id.ok()) return id.status();
  // Both are driven from here, so neither may sleep.
  for (bool running = true; running;) {
    from.progress();
    to.progress();
    const auto state = from.state(*id);
    running = state.ok() && !ended(*state);
  }
  const absl::Status status = from.status(*id);
  if (status.ok()) {
    Notification note;
    EXPECT_TRUE(to.next_notification(note));
  }
  EXPECT_TRUE(from.release(*id).ok());
  from.disconnect(*peer, Time::zero()).IgnoreError();
  return status;
}

using Cluster = std::array<std::unique_ptr<Worker>, 3>;

void expect_all_reach_all(const Cluster& cluster, const std::string& when) {
  for (const auto& from : cluster) {
    for (const auto& to : cluster) {
      if (from == to) continue;
      const absl::Status status = reaches(*from, *to);
      EXPECT_TRUE(status.ok()) << when << ": " << status;
    }
  }
}

// Promise(security): The cluster's key can be changed while everything runs | a key file may hold
//   two keys
TEST(Rotation, ARollingKeyChangeLosesNoPeer) {
  TemporaryFolder folder;
  Cluster cluster;
  for (auto& worker : cluster) worker = start(folder, kOld);
  expect_all_reach_all(cluster, "before");
  for (auto& worker : cluster) {
    worker = start(folder, std::string(kNew) + "\n" + kOld + "\n");
    expect_all_reach_all(cluster, "while workers get the new key");
  }
  for (auto& worker : cluster) {
    worker = start(folder, kNew);
    expect_all_reach_all(cluster, "while workers drop the old key");
  }
  // Who still has only the old key is out, and hears why.
  const auto late = start(folder, kOld);
  const absl::Status refused = reaches(*late, *cluster[0]);
  EXPECT_FALSE(refused.ok());
  EXPECT_NE(refused.message().find("cluster key"), absl::string_view::npos) << refused;
  EXPECT_FALSE(reaches(*cluster[0], *late).ok());
}

}  // namespace
}  // namespace baton::tcp
