// What launchers ask of the host's side: how a kernel may be launched, and how much fits.
#include <algorithm>

#include "../include/cuda_runtime.h"
#include "machine.h"

namespace emu {

size_t& shared_limit(const void* kernel) {
  static std::unordered_map<const void*, size_t> limits;
  return limits.emplace(kernel, 48 * 1024).first->second;
}

int sms() { return machine.sms; }

Config config_of(const cudaLaunchConfig_t& config, const void* kernel) {
  Config c{config.gridDim, config.blockDim, config.dynamicSmemBytes, reinterpret_cast<uint64_t>(config.stream), 1, false, kernel};
  for (unsigned i = 0; i < config.numAttrs; i++) {
    const cudaLaunchAttribute& a = config.attrs[i];
    if (a.id == cudaLaunchAttributeClusterDimension) c.cluster = static_cast<int>(a.val.clusterDim.x);
    if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      c.programmatic = a.val.programmaticStreamSerializationAllowed;
    }
  }
  return c;
}

int active_clusters(const Config& config) {
  const unsigned threads = config.block.x * config.block.y * config.block.z;
  const int by_threads = static_cast<int>(2048 / threads);
  const int by_bytes = static_cast<int>(228 * 1024 / (config.shared + 1024 + 1));
  const int per_sm = std::max(1, std::min({32, by_threads, by_bytes}));
  return machine.sms * per_sm / config.cluster;
}

}  // namespace emu
