# Everything Baton links against, found once. `./run` installs these on Debian and Ubuntu.
find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(hwy REQUIRED)
find_package(OpenSSL REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(CLI11 REQUIRED)
find_package(spdlog REQUIRED)
find_package(ZLIB REQUIRED)  # CRC-32 of handed over blocks
find_package(Boost REQUIRED)  # headers alone: Asio and Beast
find_package(PkgConfig REQUIRED)
pkg_check_modules(httplib REQUIRED IMPORTED_TARGET cpp-httplib)  # of the load generator and tests
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET libxxhash)  # its header alone is used
pkg_check_modules(icu REQUIRED IMPORTED_TARGET icu-uc)  # tokenizers: normalization, classes of characters
find_program(CCACHE ccache)
if(CCACHE)
  # Precompiled headers: known by what they are made of (BatonPrecompiled.cmake), not by their bytes.
  # Paths below the tree: relative, so that one checkout finds what another has compiled.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_PCH_EXTSUM=1 CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${CCACHE})
endif()
