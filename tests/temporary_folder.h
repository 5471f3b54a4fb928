// A folder of a test's own, which is gone when the test is over.
#pragma once

#include "tests/test.h"

namespace baton {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::path(::testing::TempDir()) / "baton-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr) << name;
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  // Of something in it: "rows.json", "a/b".
  std::string path(const std::string& name) const { return path_ + "/" + name; }

  // Writes a line to a file in it. "/sys/class/net/eth0/mtu" is below the folder too.
  TemporaryFolder& file(const std::string& name, const std::string& line) {
    const std::filesystem::path whole = path(name);
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << line << "\n";
    return *this;
  }

 private:
  std::string path_;
};

}  // namespace baton
